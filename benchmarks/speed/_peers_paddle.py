"""The side of benchmarks/speed/peers.py that is Paddle's: fleet's recompute and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.distributed.fleet.utils import recompute as fleets
from paddle.nn import functional as F

from benchmarks.speed._peers_sides import Api, Run, main
from paddle_recompute import GradCache, RecomputeConfig, apply_recompute, recompute


class Paddle(Api):
    Module = paddle.nn.Layer

    def __init__(self) -> None:
        self.ways = {
            "fleet, reentrant": lambda f, *a, **k: fleets(f, *a, **k),
            "fleet, not reentrant": lambda f, *a, **k: fleets(f, *a, use_reentrant=False, **k),
            "paddle_recompute": recompute,
        }
        self.caches = {"paddle_recompute GradCache": _cache}

    def linear(self, rows: int, columns: int) -> Any:
        return paddle.nn.Linear(rows, columns)

    def batch_norm(self, width: int) -> Any:
        return paddle.nn.BatchNorm1D(width)

    def embedding(self, count: int, width: int) -> Any:
        return paddle.nn.Embedding(count, width)

    def blocks(self, count: int, width: int) -> Any:
        make = paddle.nn.TransformerEncoderLayer
        return paddle.nn.LayerList(
            [make(width, 4, 4 * width, 0.1, activation="gelu") for _ in range(count)]
        )

    def leaf(self, *shape: int, needs_gradient: bool = True) -> Any:
        x = paddle.randn(list(shape))
        x.stop_gradient = not needs_gradient
        return x

    def ids(self, *shape: int) -> Any:
        return paddle.randint(0, 100, list(shape))

    def freeze(self, parameter: Any) -> None:
        parameter.stop_gradient = True

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

    def loss(self, query: Any, *others: Any) -> Any:
        scores = F.normalize(query) @ F.normalize(paddle.concat(list(others))).T * 20
        return F.cross_entropy(scores, paddle.arange(len(query)))

    def adamw(self, parameters: Any) -> tuple[Callable[[], object], Callable[[], object]]:
        optimizer = paddle.optimizer.AdamW(1e-3, parameters=parameters)
        return optimizer.step, optimizer.clear_grad

    def wrapped(self, way: str, blocks: Any) -> list[Run]:
        if way != "paddle_recompute":
            return super().wrapped(way, blocks)
        apply_recompute(blocks, RecomputeConfig())
        return list(blocks)


def _cache(encoders: Any, loss: Run, chunk: int) -> Run:
    return GradCache(encoders, loss, chunk_size=chunk).backward


if __name__ == "__main__":
    main(Paddle())
