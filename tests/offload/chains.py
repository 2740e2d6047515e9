"""Chains of Layers, plain and offloaded, and steps of training with either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_recompute import OffloadSequential, TrainStep
from tests.bits import values_of

VOCABULARY, LENGTH, WIDTH, BATCH, STEPS = 50, 6, 16, 8, 3


class Head(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dense = paddle.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.dense(x.mean(1))


def encoder_layers(num_layers: int = 3) -> list[paddle.nn.Layer]:
    """Tokens in, logits out; the first input is of integers. With dropout."""
    paddle.seed(11)
    blocks = [
        paddle.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1)
        for _ in range(num_layers)
    ]
    return [paddle.nn.Embedding(VOCABULARY, WIDTH), *blocks, Head()]


def batch(step: int, part: int, rank: int = 0) -> tuple[paddle.Tensor, paddle.Tensor]:
    rng = np.random.default_rng([step, part, rank])
    tokens = rng.integers(0, VOCABULARY, [BATCH, LENGTH])
    return paddle.to_tensor(tokens), paddle.to_tensor(rng.integers(0, VOCABULARY, [BATCH]))


def cross_entropy(model: paddle.nn.Layer, micro_batch: Any) -> paddle.Tensor:
    tokens, labels = micro_batch
    return paddle.nn.functional.cross_entropy(model(tokens), labels)


def adamw(parameters: Any) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.AdamW(1e-2, parameters=parameters, weight_decay=0.1)


def plain(**_: Any) -> paddle.nn.Layer:
    return paddle.nn.Sequential(*encoder_layers())


def offloaded(**options: Any) -> OffloadSequential:
    return OffloadSequential(encoder_layers(), **{"num_shards": 3, "offload": "disk", **options})


def optimizer_of(model: paddle.nn.Layer, make: Callable[..., Any] = adamw) -> Any:
    if isinstance(model, OffloadSequential):
        return model.optimizer(make)
    return make(model.parameters())


def train(
    model: paddle.nn.Layer,
    *,
    make: Callable[..., Any] = adamw,
    accumulate: int = 2,
    steps: int = STEPS,
    **options: Any,
) -> tuple[dict[str, np.ndarray], list[tuple[float, float]]]:
    """Parameters and buffers by name, and loss and gradient norm of each step."""
    rank = dist.get_rank()
    step = TrainStep(
        model,
        optimizer_of(model, make),
        loss_fn=cross_entropy,
        accumulate_steps=accumulate,
        clip_grad_norm=0.5,
        **options,
    )
    paddle.seed(5 + rank)
    told = []
    for number in range(steps):
        result = step([batch(number, part, rank) for part in range(accumulate)])
        told.append((result.loss, result.grad_norm))
    return values_of(model), told
