"""Two ranks, one of which has less memory: it runs out of it, and all go on with another plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import Trainer
from paddle_recompute._paddle import memory
from paddle_recompute.errors import ConfigError
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.trainer.out_of_memory import check_can_replan
from paddle_recompute.trainer.planned import BudgetPlanner
from paddle_recompute.trainer.planned_steps import PlannedSteps
from tests.ranks import run_ranks
from tests.trainer.test_trainer import tiny

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


class Limit:
    """An allocator limit of this process: a Linear that finds more bytes held raises."""

    def __init__(self) -> None:
        self.most, self.failures, self.highest = 2**60, 0, 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Limit the steps of training, not those of the measurement."""
        forward, survivor = paddle.nn.Linear.forward, PlannedSteps._survived
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
        patch.setattr(PlannedSteps, "_survived", watched)


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [one["loss"] for one in map(json.loads, lines) if "loss" in one]


def train(folder: str, negatives: str) -> dict[str, Any]:
    """An undisturbed run, and one in which rank 1 has less memory."""
    path = Path(folder)

    def run(name: str, budget: int, **more: Any) -> dict[str, Any]:
        settings = {**SETTINGS, "contrastive__negatives": negatives, **more}
        settings["train__output_dir"] = str(path / name)
        settings["recompute__memory_budget"] = f"{budget}B"
        return Trainer(tiny(path, **settings)).run()

    limit = Limit()
    with pytest.MonkeyPatch.context() as patch:
        limit.install(patch)
        budget = run("plain", 2**30)["plain_peak_bytes"] * 101 // 100
        if dist.get_rank() == 1:
            limit.most = int(limit.highest * 0.9)
        found = run("replanned", budget, train__on_oom="replan")
        held = RecomputePlan.load(path / "replanned" / "plan.json")
        limit.most = 2**60
        patch.setattr(BudgetPlanner, "make", lambda *_: (held, None, held.peak_bytes))
        run("from the start", budget)
    return {
        "loss": found["loss"],
        "failures": limit.failures,
        "excess": held.costs.excess,
        "recomputes": held.recomputes,
        "budget": budget,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    words = [f"w{n % 40} x{n % 7}\ty{n % 40} z{n % 11}" for n in range(300)]
    (tmp_path / "pairs.tsv").write_text("\n".join(dict.fromkeys(words)) + "\n")
    yield tmp_path


@pytest.mark.parametrize("negatives", ["local", "global"])
def test_one_rank_with_less_memory(folder: Path, negatives: str) -> None:
    first, second = run_ranks(
        train, 2, folder=str(folder), negatives=negatives, fresh=True, timeout=240
    )
    assert second["failures"] >= 1 and first["failures"] == 0
    assert first["loss"] == second["loss"]
    assert first["recomputes"] and first["excess"] >= 0.05 * first["budget"]
    assert len(losses(folder / "plain")) == 3
    assert losses(folder / "replanned") == losses(folder / "from the start")  # the same bits
    assert losses(folder / "replanned") == losses(folder / "plain")


def refusal(folder: str) -> str:
    """What a run says whose collectives a device waits for."""
    settings = {**SETTINGS, "recompute__memory_budget": "1GiB", "train__on_oom": "replan"}
    config = tiny(Path(folder), contrastive__negatives="global", **settings)
    dist.get_backend = lambda group=None: "NCCL"
    with pytest.raises(ConfigError) as found:
        check_can_replan(config)
    return str(found.value)


def test_a_device_that_would_wait_for_ever_is_refused(folder: Path) -> None:
    said = run_ranks(refusal, 2, folder=str(folder), fresh=True)
    assert said[0] == said[1]
    assert said[0].startswith("train.on_oom: replan needs contrastive.negatives: local on several")
