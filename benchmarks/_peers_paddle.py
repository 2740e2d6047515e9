"""The sides of benchmarks/peers.py that are of Paddle: fleet's recompute and ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import paddle
from paddle.distributed.fleet.utils import recompute as fleets
from paddle.nn import functional as F

from benchmarks._peers_cases import Api, Run, judge, measure
from paddle_recompute import (
    ContrastiveLoss,
    GradCache,
    RecomputeConfig,
    apply_recompute,
    recompute,
)

WIDTH, LAYERS, BATCH, LENGTH, PAIRS, CHUNK = 256, 6, 8, 64, 128, 16


class Paddle(Api):
    name = "paddle"
    Module = paddle.nn.Layer

    def linear(self, rows: int, columns: int) -> Any:
        return paddle.nn.Linear(rows, columns)

    def batch_norm(self, width: int) -> Any:
        return paddle.nn.BatchNorm1D(width)

    def leaf(self, *shape: int, needs_gradient: bool = True) -> Any:
        x = paddle.randn(list(shape))
        x.stop_gradient = not needs_gradient
        return x

    def dropout(self, x: Any) -> Any:
        return F.dropout(x, 0.3)

    def seed(self, number: int) -> None:
        paddle.seed(number)

    def array(self, tensor: Any) -> Any:
        return tensor.numpy()

    def grad(self, y: Any, x: Any) -> Any:
        return paddle.grad(y, [x])[0]

    def concat(self, parts: list[Any], axis: int) -> Any:
        return paddle.concat(parts, axis)


WAYS: dict[str, Run] = {
    "fleet, reentrant": lambda f, *a, **k: fleets(f, *a, **k),
    "fleet, not reentrant": lambda f, *a, **k: fleets(f, *a, use_reentrant=False, **k),
    "paddle_recompute": recompute,
}


def encoder_step(way: str) -> Callable[[], object]:
    paddle.seed(0)
    block = paddle.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, activation="gelu")
    encoder = paddle.nn.TransformerEncoder(block, LAYERS)
    if way == "paddle_recompute":
        apply_recompute(encoder, RecomputeConfig())
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=encoder.parameters())
    x = paddle.randn([BATCH, LENGTH, WIDTH])
    x.stop_gradient = False

    def step() -> None:
        h = x
        for layer in encoder.layers:
            h = WAYS[way](layer, h) if way.startswith("fleet") else layer(h)
        h.square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()

    return step


class Tower(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        block = paddle.nn.TransformerEncoderLayer(64, 4, 256, 0.1, activation="gelu")
        self.words = paddle.nn.Embedding(100, 64)
        self.body = paddle.nn.TransformerEncoder(block, 4)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        return self.body(self.words(ids)).mean(1)


def contrastive_step(way: str) -> Callable[[], object]:
    paddle.seed(0)
    tower = Tower()
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=tower.parameters())
    query, positive = paddle.randint(0, 100, [2, PAIRS, 32])
    loss = ContrastiveLoss(0.05, normalize=True)
    cache = GradCache(tower, loss, chunk_size=CHUNK)

    def step() -> None:
        if way == "plain":
            loss(tower(query), tower(positive)).backward()
        else:
            cache.backward(query, positive)
        optimizer.step()
        optimizer.clear_grad()

    return step


def main() -> None:
    what, way = sys.argv[1:3]
    if what == "cases":
        result: Any = judge(Paddle(), WAYS[way])
    elif what == "encoder":
        result = measure(encoder_step(way))
    else:
        result = measure(contrastive_step(way))
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()
