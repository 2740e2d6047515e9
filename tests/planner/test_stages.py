"""What sharding and offload are predicted to take, against steps that do it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import paddle
import pytest

from paddle_recompute import TrainStep
from paddle_recompute._paddle import memory
from paddle_recompute.app.trainer.memory import job_of, largest_of_ranks, measure_step
from paddle_recompute.app.trainer.step import Chunks
from paddle_recompute.errors import PlanError
from paddle_recompute.offload import offload_layers, offloaded_optimizer
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.planner import Job, make_plan, offloaded, smallest, spread, stages
from tests.app.trainer.test_trainer import tiny
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not memory.can_reset_peak(), reason="2.6 cannot start the peak anew"
)
LAYERS, WIDTH = 8, 64
CLOSE = 0.1
"""Which shard is on its way when, and when the gradients leave, is not simulated."""


def model_of() -> paddle.nn.Layer:
    paddle.seed(0)
    block = paddle.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1)
    return paddle.nn.TransformerEncoder(block, LAYERS)


def adamw(parameters: Any) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.AdamW(1e-3, parameters=parameters)


def loss_fn(model: Any, batch: Any) -> Any:
    return model(batch).square().mean()


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
        (["stage 1"], {}),
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


@pytest.mark.parametrize("rows", [1, 16])
def test_the_predicted_peak_is_nearly_that_of_a_step(rows: int) -> None:
    model, batch = model_of(), paddle.randn([rows, 16, WIDTH])
    costs = Job(model, batch, loss_fn, adamw(model.parameters())).measure()
    found = offloaded(costs)
    assert found is not None and f"num_shards: {LAYERS} " in found.setting
    parameters = sum(int(p.size) * 4 for p in model.parameters())
    assert found.moved_bytes == pytest.approx(10 * parameters, rel=0.01)
    del model
    gc.collect()
    held = memory.current_bytes()  # of other tests
    model = model_of()
    section = {"enable": True, "checkpoints": ["layers.*"], "offload_parameters": "disk"}
    offload_layers(model, RecomputeConfig(**section, num_shards=LAYERS))
    optimizer = offloaded_optimizer(model, model.parameters(), adamw)
    step = TrainStep(model, optimizer, loss_fn=loss_fn)
    step([batch]), step([batch])
    gc.collect()
    memory.reset_peak()
    step([batch])
    of_batch = int(batch.size) * 4
    others = costs.base - sum(costs.held.values())
    measured = memory.peak_bytes() - held + of_batch + others
    assert measured < 0.8 * smallest(costs).peak or rows > 1
    inputs = (LAYERS - 1) * of_batch  # they leave sooner or later
    assert found.peak_bytes >= measured * (1 - CLOSE)
    assert found.peak_bytes - inputs <= measured * (1 + CLOSE)


def test_a_budget_that_is_too_small_names_what_takes_less() -> None:
    model, batch = model_of(), paddle.randn([1, 16, WIDTH])
    optimizer = adamw(model.parameters())
    costs = Job(model, batch, loss_fn, optimizer, keeps_gradients=False, ranks=2).measure()
    ways = [one for one in (offloaded(costs), *stages(costs)) if one is not None]
    assert len(ways) == 3 and all(one.peak_bytes < smallest(costs).peak for one in ways)
    assert ways[2].peak_bytes < ways[1].peak_bytes
    for budget in sorted(one.peak_bytes for one in ways):
        with pytest.raises(PlanError) as error:
            make_plan(costs, budget, signature="")
        for one in ways:
            words = "within" if one.peak_bytes <= budget else "still not within"
            assert f"{one}, {words} the budget" in str(error.value)
