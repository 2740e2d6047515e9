"""Two ranks, one of which has less memory: all end, and their next start has a smaller plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import Trainer
from paddle_recompute._paddle import memory
from paddle_recompute.app.trainer.budget_plan import (
    PlannedSteps,
    earlier_plan,
    make_budget_plan,
    write_smaller_plan,
)
from paddle_recompute.app.trainer.step import Chunks
from paddle_recompute.errors import CheckpointError, OutOfMemoryError, PeerError
from paddle_recompute.planner import RecomputePlan
from tests.app.trainer.test_same_training import losses_of
from tests.app.trainer.test_trainer import tiny
from tests.distributed.mortal_ranks import results_of

pytestmark = pytest.mark.skipif(
    not memory.can_reset_peak(), reason="2.6 cannot start the peak anew"
)
SETTINGS: dict[str, Any] = {
    "launch__num_ranks": 2,
    "model__hidden_size": 32,
    "model__num_layers": 4,
    "model__intermediate_size": 128,
    "contrastive__global_batch": 64,
    "recompute__enable": True,
    "recompute__policy": "budget",
    "train__max_steps": 3,
    "train__eval_before": False,
    "train__warmup_steps": 0,
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


def run(folder: str, name: str, negatives: str, budget: int, **more: Any) -> dict[str, Any]:
    settings = {**SETTINGS, "contrastive__negatives": negatives, **more}
    settings["train__output_dir"] = str(Path(folder) / name)
    settings["recompute__memory_budget"] = f"{budget}B"
    return Trainer(tiny(Path(folder), **settings)).run()


def run_with_less(folder: str, negatives: str) -> dict[str, Any]:
    """An undisturbed run, and one in which rank 1 has less memory from its second step on."""
    limit = Limit()
    with pytest.MonkeyPatch.context() as patch:
        limit.install(patch)
        budget = run(folder, "plain", negatives, 2**30)["plain_peak_bytes"] * 101 // 100
        if dist.get_rank() == 1:
            limit.most = int(limit.highest * 0.9)
        with pytest.raises((OutOfMemoryError, PeerError)) as caught:
            run(folder, "short", negatives, budget, **REPLANS)
    return {
        "kind": type(caught.value).__name__,
        "message": str(caught.value),
        "failures": limit.failures,
        "budget": budget,
    }


def run_again(folder: str, negatives: str, budget: int) -> dict[str, Any]:
    """The same command, with the same little memory."""
    found = run(folder, "short", negatives, budget, **REPLANS)
    plan = RecomputePlan.load(Path(folder) / "short" / "plan.json")
    return {"loss": found["loss"], "excess": plan.costs.excess, "recomputes": plan.recomputes}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    words = [f"w{n % 40} x{n % 7}\ty{n % 40} z{n % 11}" for n in range(300)]
    (tmp_path / "pairs.tsv").write_text("\n".join(dict.fromkeys(words)) + "\n")
    yield tmp_path


@pytest.mark.parametrize("negatives", [pytest.param("local", marks=pytest.mark.matrix), "global"])
def test_one_rank_with_less_memory_ends_the_run_and_the_next_start_has_another_plan(
    folder: Path, negatives: str
) -> None:
    first, second = results_of(run_with_less, folder=str(folder), negatives=negatives)
    assert (first["kind"], second["kind"]) == ("PeerError", "OutOfMemoryError")
    assert (first["failures"], second["failures"]) == (0, 1)
    smaller = folder / "short" / "checkpoint" / "plan.json"
    assert f"A smaller plan is in {smaller}: start the run again" in second["message"]
    assert first["message"].startswith("rank 1 failed")
    assert "MemoryError: more than" in first["message"]
    budget = first["budget"]
    again = results_of(run_again, folder=str(folder), negatives=negatives, budget=budget)
    assert again[0] == again[1]
    assert again[0]["recomputes"] and again[0]["excess"] >= int(0.05 * budget)
    assert len(losses_of(folder / "plain")) == 3
    assert losses_of(folder / "short") == losses_of(folder / "plain")  # the same bits


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
