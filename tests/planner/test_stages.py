"""What sharding is predicted to take, against a step of the trainer that does it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import paddle
import pytest

from paddle_recompute._paddle import memory
from paddle_recompute.app.trainer.memory import job_of, largest_of_ranks, measure_step
from paddle_recompute.app.trainer.objective import Chunks
from paddle_recompute.errors import PlanError
from paddle_recompute.planner import Job, make_plan, smallest, spread, stages
from tests.app.trainer.test_trainer import tiny
from tests.planner.test_offloaded import CLOSE, LAYERS, WIDTH, adamw, loss_fn, model_of
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not memory.can_reset_peak(), reason="2.6 cannot start the peak anew"
)
VOCABULARY = 100
WIDE: dict[str, Any] = {
    "model__hidden_size": 128,
    "model__intermediate_size": 256,
    "model__num_layers": 4,
    "launch__num_ranks": 2,
}
WAYS: dict[str, dict[str, Any]] = {
    "stage 1": {"strategy__sharding": True},
    "stage 3": {"recompute__offload_parameters": "ranks", "recompute__num_shards": 4},
}


def worker(folder: str, ways: list[str], **changes: Any) -> list[tuple[int, int]]:
    """Predicted and measured peak of a step in each way."""
    found = []
    for way in ways:
        gc.collect()
        config = tiny(Path(folder), **{**WIDE, **changes, **WAYS[way]})
        chunks = Chunks(config.contrastive.chunk_size)
        before = memory.current_bytes()
        first, third = stages(job_of(config, VOCABULARY, chunks).measure())
        gc.collect()
        peak = measure_step(config, VOCABULARY, chunks)
        assert memory.current_bytes() - before < 2**16  # nothing of its model is left
        one = first if way == "stage 1" else third
        found.append((one.peak_bytes, largest_of_ranks(peak)))
    return found


ACCUMULATION = {
    "strategy__gradient_merge": True,
    "strategy__gradient_merge_configs": {"k_steps": 2},
}


@pytest.mark.parametrize(
    ("ways", "changes"),
    [
        (["stage 1", "stage 3"], {}),
        (["stage 1", "stage 3"], {"contrastive__chunk_size": 2}),
        (["stage 3"], ACCUMULATION),
    ],
    ids=["one batch", "gradient cache", "accumulation"],
)
def test_the_predicted_peaks_are_nearly_those_of_steps(
    tmp_path: Path, ways: list[str], changes: dict[str, Any]
) -> None:
    for rank in run_ranks(worker, 2, folder=str(tmp_path), ways=ways, **changes):
        for predicted, measured in rank:
            assert predicted == pytest.approx(measured, rel=CLOSE)


def test_many_ranks_keep_all_gradients_in_the_first_step() -> None:
    model, batch = model_of(), paddle.randn([1, 16, WIDTH])
    optimizer = adamw(model.parameters())
    for keeps in (False, True):
        job = Job(model, batch, loss_fn, optimizer, ranks=LAYERS, keeps_gradients=keeps)
        costs = job.measure()
        one = spread(costs)
        assert one is not None
        gradients = sum(sum(call.gradients.values()) for call in costs.calls)
        assert one.peak_bytes > gradients * (1 + 1 / LAYERS)
        assert one.peak_bytes < smallest(costs).peak
    assert spread(costs, LAYERS - 1) is None  # fewer shards than ranks


def test_a_budget_that_is_too_small_names_the_stages() -> None:
    model, batch = model_of(), paddle.randn([1, 16, WIDTH])
    optimizer = adamw(model.parameters())
    costs = Job(model, batch, loss_fn, optimizer, keeps_gradients=False, ranks=2).measure()
    first, third = stages(costs)
    assert third.peak_bytes < first.peak_bytes < smallest(costs).peak
    for budget, words in ((first.peak_bytes, "within"), (third.peak_bytes, "still not within")):
        with pytest.raises(PlanError) as error:
            make_plan(costs, budget, signature="")
        assert f"{first}, {words} the budget" in str(error.value)
        assert f"{third}, within the budget" in str(error.value)
