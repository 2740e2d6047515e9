"""`recompute.policy: budget`: a run whose recompute is planned, in both modes, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddle_recompute import Trainer, TrainStep, load_config
from paddle_recompute._paddle import memory
from paddle_recompute.errors import ConfigError, PlanError
from paddle_recompute.planner import RecomputePlan
from tests.ranks import ROOT

CONFIG = ROOT / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml"

needs_peaks = pytest.mark.skipif(
    not memory.can_reset_peak(), reason="2.6 cannot start the peak anew"
)


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    pairs = folder / "pairs.tsv"
    if not pairs.exists():
        words = [f"w{n}\tword {n} of {n % 7} kinds and {n % 5} others" for n in range(400)]
        pairs.write_text("\n".join(words) + "\n", encoding="utf-8")
    return Trainer(
        load_config(
            CONFIG,
            [
                "launch.num_ranks=1",
                "contrastive.global_batch=64",
                "data.source=files",
                f"data.train_file={pairs}",
                "data.valid_pairs=40",
                "data.pool_size=80",
                "data.vocab_size=300",
                f"data.cache_dir={folder}",
                "train.max_steps=4",
                "train.warmup_steps=0",
                "train.eval_before=false",
                f"train.output_dir={folder / 'out'}",
                *overrides,
            ],
        )
    ).run()


@needs_peaks
@pytest.mark.parametrize("mode", ["dygraph", "static"])
def test_a_run_stays_within_its_budget(tmp_path: Path, mode: str) -> None:
    (tmp_path / "all").mkdir(), (tmp_path / "plan").mkdir()
    whole = run(tmp_path / "all", f"mode={mode}")
    low, high = whole["peak_bytes"], whole["plain_peak_bytes"]
    budget = low + (high - low) // 2
    found = run(
        tmp_path / "plan",
        f"mode={mode}",
        "recompute.policy=budget",
        f"recompute.memory_budget={budget}B",
    )
    assert low < found["peak_bytes"] <= budget
    assert found["loss"] == whole["loss"]  # the same bits, whatever is recomputed
    plan = RecomputePlan.load(tmp_path / "plan" / "out" / "plan.json")
    assert plan.memory_budget == budget
    assert plan.measured_bytes == pytest.approx(found["peak_bytes"], rel=0.01)


@needs_peaks
def test_the_plan_of_a_checkpoint_is_kept(tmp_path: Path) -> None:
    budget = ["recompute.policy=budget", "recompute.memory_budget=1GiB"]
    run(tmp_path, *budget, "train.max_steps=2")
    state = next((tmp_path / "out" / "checkpoint").glob("step-2/state.json"))
    saved = RecomputePlan.from_dict(json.loads(state.read_text())["plan"])
    run(tmp_path, *budget, "train.max_steps=4", "train.resume=true")
    assert RecomputePlan.load(tmp_path / "out" / "plan.json") == saved


@needs_peaks
def test_a_budget_that_is_too_small_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="smallest feasible budget"):
        run(tmp_path, "recompute.policy=budget", "recompute.memory_budget=1MiB")


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["recompute.policy=budget"], "required with policy: budget"),
        (["recompute.memory_budget=1GiB"], "has no effect with policy: all"),
        (
            ["recompute.policy=budget", "recompute.memory_budget=1GiB", "recompute.engine=fleet"],
            "not supported by engine: fleet",
        ),
        (["train.on_oom=replan"], "needs recompute.policy: budget"),
        (
            [
                *("recompute.policy=budget", "recompute.memory_budget=1GiB", "train.on_oom=replan"),
                *("launch.num_ranks=2", "contrastive.negatives=global"),
            ],
            "on 2 ranks needs contrastive.negatives: local",
        ),
    ],
)
def test_contradictions_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(CONFIG, overrides)


@needs_peaks
def test_a_step_that_runs_out_of_memory_is_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "once").mkdir(), (tmp_path / "never").mkdir()
    planned = ["recompute.policy=budget", "recompute.memory_budget=1GiB"]
    undisturbed = run(tmp_path / "never", *planned)
    own_step = TrainStep.__call__
    calls = []

    def fails_once(self: TrainStep, micro_batches: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 4:  # two steps of the measurement, one of training
            self._model(micro_batches[0]["query"]).sum().backward()
            raise MemoryError("out of memory")
        return own_step(self, micro_batches)

    monkeypatch.setattr(TrainStep, "__call__", fails_once)
    found = run(tmp_path / "once", *planned, "train.on_oom=replan")
    assert len(calls) == 7
    assert found["loss"] == undisturbed["loss"]  # the same bits
    plan = RecomputePlan.load(tmp_path / "once" / "out" / "plan.json")
    assert plan.costs.excess >= int(0.05 * 2**30)
    calls.clear()
    with pytest.raises(ConfigError, match=r"ran out of memory.*on_oom: replan"):
        run(tmp_path / "once", *planned)
