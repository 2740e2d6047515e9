"""`recompute.policy: budget`: a run whose recompute is planned, in both modes, and resumed.

Of two ranks, one has less memory: all end, and their next start has a smaller plan.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_recompute import Trainer, TrainStep
from paddle_recompute._paddle import memory
from paddle_recompute.app.trainer import budget_plan
from paddle_recompute.app.trainer.events import Events
from paddle_recompute.app.trainer.peak_memory import plain_peak
from paddle_recompute.errors import (
    ConfigError,
    PlanError,
)
from paddle_recompute.planner import RecomputePlan, smallest
from tests.app.trainer.test_same_training import losses_of
from tests.app.trainer.test_trainer import tiny

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


@needs_peaks
def test_a_budget_that_is_too_small_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="smallest feasible budget"):
        run(tmp_path, **budget_of(2**16))


@needs_peaks
def test_a_step_that_runs_out_of_memory_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_step = TrainStep.__call__
    calls = []

    def fails(self: TrainStep, micro_batches: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 4:  # two steps of the measurement, one of training
            raise MemoryError("out of memory")
        return own_step(self, micro_batches)

    monkeypatch.setattr(TrainStep, "__call__", fails)
    with pytest.raises(ConfigError, match=r"step 2 ran out of memory.*lower recompute.memory_bud"):
        run(tmp_path, **budget_of(2**30))
