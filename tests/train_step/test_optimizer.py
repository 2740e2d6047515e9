"""The learning rate of every step, and which parameters are decayed."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_recompute.config import Config
from paddle_recompute.train_step.optimizer import (
    build_optimizer,
    build_schedule,
    decayed_parameters,
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
    schedule = build_schedule(config(**train), total)
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
        ({"decay": "linear", "warmup_steps": 2}, [0.5, 0.75, 1.0, 0.5]),
        ({"decay": "cosine", "warmup_steps": 2}, [0.5, 0.75, 1.0, 0.5]),
        ({"decay": "constant", "warmup_steps": 2}, [0.5, 0.75, 1.0, 1.0]),
        ({"decay": "linear", "warmup_steps": 4}, [0.25, 0.4375, 0.625, 0.8125]),
    ],
)
def test_schedule(train: dict[str, Any], expected: list[float]) -> None:
    assert rates(4, **train) == pytest.approx(expected)


def test_peak_is_scaled_by_the_global_batch() -> None:
    assert rates(2, scale_learning_rate_from=2)[0] == 2.0


class Block(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = paddle.nn.Embedding(5, 4)
        self.norm = paddle.nn.LayerNorm(4)
        self.attention = paddle.nn.MultiHeadAttention(4, 2)


def test_biases_and_norms_are_not_decayed() -> None:
    model = Block()
    decayed = decayed_parameters(model)
    names = {name for name, parameter in model.named_parameters() if parameter.name in decayed}
    assert names == {
        "embedding.weight",
        *(f"attention.{side}_proj.weight" for side in ("q", "k", "v", "out")),
    }


def test_decay_reaches_only_those_parameters() -> None:
    model = Block()
    before = {name: parameter.numpy() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(config(weight_decay=0.5), model, 0.5)
    sum(parameter.sum() * 0.0 for parameter in model.parameters()).backward()
    optimizer.step()
    factors = {
        name: parameter.numpy().sum() / before[name].sum()
        for name, parameter in model.named_parameters()
        if before[name].any()
    }
    assert factors["norm.weight"] == 1.0
    assert factors["embedding.weight"] == pytest.approx(0.75)


def test_frozen_parameters_are_left_out() -> None:
    model = Block()
    model.embedding.weight.stop_gradient = True
    optimizer = build_optimizer(config(), model, 0.5)
    assert len(optimizer._parameter_list) == len(model.parameters()) - 1
