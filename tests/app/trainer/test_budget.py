"""`recompute.policy: budget`: a run whose recompute is planned, in both modes, and resumed.

Of two ranks, one has less memory: all end, and their next start has a smaller plan.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import Trainer, TrainStep
from paddle_recompute._paddle import memory
from paddle_recompute.app.trainer import budget_plan
from paddle_recompute.app.trainer.budget_plan import (
    PlannedSteps,
    earlier_plan,
    make_budget_plan,
    write_smaller_plan,
)
from paddle_recompute.app.trainer.events import Events
from paddle_recompute.app.trainer.peak_memory import plain_peak
from paddle_recompute.app.trainer.step import Chunks
from paddle_recompute.errors import (
    CheckpointError,
    ConfigError,
    OutOfMemoryError,
    PeerError,
    PlanError,
)
from paddle_recompute.planner import RecomputePlan, smallest
from tests.app.trainer.test_same_training import losses_of
from tests.app.trainer.test_trainer import tiny, without_report
from tests.distributed.mortal_ranks import results_of

pytestmark = pytest.mark.usefixtures("measured")
needs_peaks = pytest.mark.skipif(
    not memory.can_reset_peak(), reason="2.6 cannot start the peak anew"
)


HOST = socket.gethostname()
SIZES = {
    "model__hidden_size": 32,
    "model__num_layers": 2,
    "model__intermediate_size": 128,
    "contrastive__global_batch": 64,
    "recompute__enable": True,
    "recompute__checkpoints": ["encoder.layers.*"],
    "train__max_steps": 4,
    "train__warmup_steps": 0,
    "train__decay": "constant",  # a longer run begins with the same steps
    "train__eval_before": False,
}


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    pairs = folder / "pairs.tsv"
    if not pairs.exists():
        # Longer than the longest texts of `tiny`: every batch is as large as the measured one.
        long = [" ".join(f"w{n * k % 61}" for k in range(1, 15)) for n in range(400)]
        words = [f"{n} {text}\tof {n} {text}" for n, text in enumerate(long)]
        pairs.write_text("\n".join(words) + "\n", encoding="utf-8")
    changes.setdefault("train__overwrite", not changes.get("train__resume"))
    return Trainer(tiny(folder, **{**SIZES, **changes})).run()


def plan_of(folder: Path) -> RecomputePlan:
    return RecomputePlan.load(folder / "run" / "plan.json")


def budget_of(size: int) -> dict[str, Any]:
    return {"recompute__policy": "budget", "recompute__memory_budget": f"{size}B"}


@needs_peaks
@pytest.mark.parametrize("mode", ["dygraph", "static"])
def test_a_run_stays_within_its_budget(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget is between the peaks with all blocks recomputed and with none."""
    if mode == "static":  # an executor frees late on a CPU that others use, too
        monkeypatch.setattr(budget_plan, "measure_peak", lambda *given: given[-1].peak_bytes)
    run(tmp_path / "plain", mode=mode, **budget_of(2**30))
    plain = plan_of(tmp_path / "plain")
    low, high = smallest(plain.costs).peak, plain_peak(plain.costs)
    assert not plain.recomputes and low < high
    budget = low + (high - low) // 2
    record = run(tmp_path / "planned", mode=mode, **budget_of(budget))
    # The same bits, whatever is recomputed.
    assert losses_of(tmp_path / "planned" / "run") == losses_of(tmp_path / "plain" / "run")
    plan = plan_of(tmp_path / "planned")
    assert plan.memory_budget == budget and plan.recomputes
    assert plan.measured_bytes is not None and plan.measured_bytes <= budget
    if mode == "dygraph":
        assert record["peak_bytes"] <= budget
        assert plan.measured_bytes == pytest.approx(record["peak_bytes"], rel=0.01)


@pytest.mark.parametrize(
    ("mode", "told"), [("dygraph", 1), ("static", 0)], ids=["eager", "a Program, freed late"]
)
def test_a_step_above_the_budget_is_told_once(
    mode: str, told: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Something else has taken memory meanwhile."""
    config, budget = tiny(tmp_path, mode=mode), 2**30
    steps = SimpleNamespace(plan=SimpleNamespace(memory_budget=budget))
    run: Any = SimpleNamespace(config=config, steps=steps, step=3)
    events = Events(config, 0)
    for above in (0, 1, 1):
        events.on_log(run, {"peak_bytes": budget + above})
    shown = capsys.readouterr().out
    assert shown.count("more than recompute.memory_budget: 1.00 GiB: something beside") == told


@needs_peaks
def test_the_plan_of_a_checkpoint_is_kept(tmp_path: Path) -> None:
    budget = budget_of(2**30)
    run(tmp_path, **budget, train__max_steps=2)
    state = next((tmp_path / "run" / "checkpoint").glob("step-2/state.json"))
    saved = RecomputePlan.from_dict(json.loads(state.read_text())["plan"])
    run(tmp_path, **budget, train__max_steps=4, train__resume=True)
    assert plan_of(tmp_path) == saved
    # One that was made while a run went on was not measured.
    config, another = tiny(tmp_path, **SIZES, **budget), saved.recalibrated(2**20)
    kept, _, peak = make_budget_plan(config, 100, Chunks(), say=print, earlier=another)
    assert kept is another and peak == another.peak_bytes


@needs_peaks
def test_a_budget_that_is_too_small_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="smallest feasible budget"):
        run(tmp_path, **budget_of(2**16))


@needs_peaks
def test_a_step_that_runs_out_of_memory_is_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = budget_of(2**30)
    run(tmp_path / "never", **planned)
    own_step = TrainStep.__call__
    calls = []

    def fails_once(self: TrainStep, micro_batches: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 4:  # two steps of the measurement, one of training
            self._model(micro_batches[0]["query"]).sum().backward()
            raise MemoryError("out of memory")
        return own_step(self, micro_batches)

    monkeypatch.setattr(TrainStep, "__call__", fails_once)
    run(tmp_path / "once", **planned, train__on_oom="replan")
    assert len(calls) == 7
    assert losses_of(tmp_path / "once" / "run") == losses_of(tmp_path / "never" / "run")
    assert plan_of(tmp_path / "once").costs.excess >= int(0.05 * 2**30)
    calls.clear()
    with pytest.raises(ConfigError, match=r"ran out of memory.*on_oom: replan"):
        run(tmp_path / "once", **planned)


# --------------------------------------------------------------------------- ranks with less memory

SETTINGS: dict[str, Any] = {
    **SIZES,
    "launch__num_ranks": 2,
    "model__num_layers": 4,
    "recompute__policy": "budget",
    "train__max_steps": 3,
}
REPLANS: dict[str, Any] = {
    "train__on_oom": "replan",
    "train__resume": "auto",
    "train__save_every": 1,
}


class Limit:
    """An allocator limit of this process: a Linear that finds more bytes held raises."""

    def __init__(self) -> None:
        self.most, self.failures, self.highest = 2**60, 0, 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Limit the steps of training, not those of the measurement."""
        forward, survivor = paddle.nn.Linear.forward, PlannedSteps.__call__
        inside: list[bool] = []

        def limited(layer: Any, x: paddle.Tensor) -> paddle.Tensor:
            if inside:
                self.highest = max(self.highest, memory.current_bytes())
            if inside and memory.current_bytes() > self.most:
                self.failures += 1
                raise MemoryError(f"more than {self.most} bytes")
            return forward(layer, x)

        def watched(steps: PlannedSteps, *arguments: Any) -> Any:
            inside.append(True)
            try:
                return survivor(steps, *arguments)
            finally:
                inside.clear()

        patch.setattr(paddle.nn.Linear, "forward", limited)
        patch.setattr(PlannedSteps, "__call__", watched)


@without_report
def run_rank(folder: str, name: str, budget: int, **more: Any) -> dict[str, Any]:
    settings = {**SETTINGS, **more}
    settings["train__output_dir"] = str(Path(folder) / name)
    settings["recompute__memory_budget"] = f"{budget}B"
    return Trainer(tiny(Path(folder), **settings)).run()


def run_with_less(folder: str) -> dict[str, Any]:
    """An undisturbed run, and one in which rank 1 has less memory from its second step on."""
    limit = Limit()
    with pytest.MonkeyPatch.context() as patch:
        limit.install(patch)
        budget = run_rank(folder, "plain", 2**30)["plain_peak_bytes"] * 101 // 100
        if dist.get_rank() == 1:
            limit.most = int(limit.highest * 0.9)
        with pytest.raises((OutOfMemoryError, PeerError)) as caught:
            run_rank(folder, "short", budget, **REPLANS)
    return {
        "kind": type(caught.value).__name__,
        "message": str(caught.value),
        "failures": limit.failures,
        "budget": budget,
    }


def run_again(folder: str, budget: int) -> dict[str, Any]:
    """The same command, with the same little memory."""
    found = run_rank(folder, "short", budget, **REPLANS)
    plan = RecomputePlan.load(Path(folder) / "short" / "plan.json")
    return {"loss": found["loss"], "excess": plan.costs.excess, "recomputes": plan.recomputes}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words = [f"w{n % 40} x{n % 7}\ty{n % 40} z{n % 11}" for n in range(300)]
    (tmp_path / "pairs.tsv").write_text("\n".join(dict.fromkeys(words)) + "\n")
    return tmp_path


@needs_peaks
def test_one_rank_with_less_memory_ends_the_run_and_the_next_start_has_another_plan(
    folder: Path,
) -> None:
    first, second = results_of(run_with_less, folder=str(folder))
    assert (first["kind"], second["kind"]) == ("PeerError", "OutOfMemoryError")
    assert (first["failures"], second["failures"]) == (0, 1)
    smaller = folder / "short" / "checkpoint" / "plan.json"
    assert f"A smaller plan is in {smaller}: start the run again" in second["message"]
    assert first["message"].startswith(f"rank 1 on {HOST} failed")
    assert "MemoryError: more than" in first["message"]
    budget = first["budget"]
    again = results_of(run_again, folder=str(folder), budget=budget)
    assert again[0] == again[1]
    assert again[0]["recomputes"] and again[0]["excess"] >= int(0.05 * budget)
    assert len(losses_of(folder / "plain")) == 3
    assert losses_of(folder / "short") == losses_of(folder / "plain")  # the same bits


@needs_peaks
def test_a_smaller_plan_is_for_its_own_run(folder: Path) -> None:
    """It is not taken by another model, or for another batch."""
    settings = {**SETTINGS, **REPLANS, "recompute__memory_budget": "1GiB", "launch__num_ranks": 1}
    config = tiny(folder, **settings)
    file = write_smaller_plan(config, make_budget_plan(config, 100, Chunks(), say=print)[0])
    for changes in ({}, {"model__num_layers": 3}, {"contrastive__global_batch": 32}):
        taken = earlier_plan(tiny(folder, **{**settings, **changes}), None)
        assert (taken is None) == bool(changes)
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"plan\.json: cannot be read"):
        earlier_plan(config, None)
