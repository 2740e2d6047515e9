"""What offloading parameters is predicted to take, against a step that does it."""

from __future__ import annotations

import gc
from typing import Any

import paddle
import pytest

from paddle_recompute import TrainStep
from paddle_recompute._paddle import memory
from paddle_recompute.errors import PlanError
from paddle_recompute.offload import offload_layers, offloaded_optimizer
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.planner import Job, make_plan, offloaded, smallest

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


@pytest.mark.parametrize("rows", [1, 16])
def test_the_predicted_peak_is_nearly_that_of_a_step(rows: int) -> None:
    model, batch = model_of(), paddle.randn([rows, 16, WIDTH])
    costs = Job(model, batch, loss_fn, adamw(model.parameters())).measure()
    found = offloaded(costs)
    assert found is not None and found.num_shards == LAYERS
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


def test_a_budget_that_no_recompute_meets_names_offload() -> None:
    model, batch = model_of(), paddle.randn([1, 16, WIDTH])
    costs = Job(model, batch, loss_fn, adamw(model.parameters())).measure()
    found = offloaded(costs)
    assert found is not None
    for budget, words in (
        (found.peak_bytes, "within"),
        (found.peak_bytes // 2, "still not within"),
    ):
        with pytest.raises(PlanError, match=rf"num_shards: {LAYERS} .*, {words} the budget"):
            make_plan(costs, budget, signature="")
