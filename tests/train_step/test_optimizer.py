"""The learning rate of every step, and which parameters are decayed."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_recompute.app.config import Config, schedule_of
from paddle_recompute.train_step import TrainStep
from paddle_recompute.train_step.optimizer import (
    build_optimizer,
)


def config(**train: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"preset": "tiny"},
            "contrastive": {"global_batch": 4},
            "train": {"max_steps": 10, "learning_rate": 1.0, **train},
        }
    )


def rates(total: int, **train: Any) -> list[float]:
    schedule = schedule_of(config(**train), total)
    found = []
    for _ in range(total):
        found.append(schedule())
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"decay": "linear"}, [1.0, 0.75, 0.5, 0.25]),
        ({"decay": "cosine"}, [1.0, 0.85355339, 0.5, 0.14644661]),
        ({"decay": "constant"}, [1.0, 1.0, 1.0, 1.0]),
        ({"decay": "linear", "warmup_steps": 1}, [1.0, 0.75, 0.5, 0.25]),
        ({"decay": "linear", "warmup_steps": 2}, [0.5, 1.0, 2 / 3, 1 / 3]),
        ({"decay": "cosine", "warmup_steps": 2}, [0.5, 1.0, 0.75, 0.25]),
        ({"decay": "constant", "warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0]),
        ({"decay": "linear", "warmup_steps": 3}, [1 / 3, 2 / 3, 1.0, 0.5]),
        ({"decay": "linear", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0]),
        ({"decay": "cosine", "warmup_steps": 8}, [0.125, 0.25, 0.375, 0.5]),
        # The peak is scaled by the global batch.
        ({"decay": "constant", "scale_learning_rate_from": 2}, [2.0, 2.0, 2.0, 2.0]),
    ],
)
def test_schedule(train: dict[str, Any], expected: list[float]) -> None:
    assert rates(4, **train) == pytest.approx(expected)


def test_the_rate_is_what_a_step_moves_by() -> None:
    """The gradient of the loss is the same in every step: AdamW then moves by the rate."""
    changes = {"decay": "linear", "warmup_steps": 3, "weight_decay": 0.0}
    settings, total = config(**changes), 5
    schedule = schedule_of(settings, total)
    paddle.seed(0)
    model = paddle.nn.Linear(1, 1, bias_attr=False)
    optimizer = build_optimizer(settings.optimizer, model, schedule)
    step = TrainStep(model, optimizer, loss_fn=lambda model, batch: model(batch).mean())
    moved = []
    for _ in range(total):
        before = model.weight.item()
        step([paddle.ones([4, 1])])
        schedule.step()
        moved.append(before - model.weight.item())
    # The moments of AdamW and the difference of two weights are in float32, the weights near 1.
    assert moved == pytest.approx(rates(total, **changes), abs=1e-5)


class Block(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = paddle.nn.Embedding(5, 4)
        self.norm = paddle.nn.LayerNorm(4)
        self.attention = paddle.nn.MultiHeadAttention(4, 2)


def test_decay_reaches_neither_biases_nor_norms_nor_what_is_frozen() -> None:
    paddle.seed(0)  # sums of weights that nearly cancel would tell their ratio badly
    model = Block()
    model.attention.q_proj.weight.stop_gradient = True
    before = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(config(weight_decay=0.5).optimizer, model, 0.5)
    sum(parameter.sum() * 0.0 for parameter in model.parameters()).backward()
    optimizer.step()
    factors = {
        name: parameter.numpy().sum() / before[name].sum()
        for name, parameter in model.named_parameters()
        if before[name].any()
    }
    decayed = {"embedding.weight", *(f"attention.{side}_proj.weight" for side in ("k", "v", "out"))}
    assert factors.keys() == {*decayed, "norm.weight", "attention.q_proj.weight"}
    for name, factor in factors.items():
        assert factor == pytest.approx(0.75 if name in decayed else 1.0, rel=1e-4), name
    assert len(optimizer._parameter_list) == len(model.parameters()) - 1
