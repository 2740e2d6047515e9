"""The blocks and models of `benchmarks.memory.leaks`; each block keeps the shape of its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.autograd import PyLayer

ROWS, WIDTH = 64, 32


class Block(paddle.nn.Layer):
    """A part of a model, with a PyLayer if one is given."""

    def __init__(self, kind: type[PyLayer] | None = None) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)
        self.act = paddle.nn.GELU()
        self.norm = paddle.nn.LayerNorm(WIDTH)
        self.kind = kind

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        h = self.act(self.linear(self.norm(x)))
        return h if self.kind is None else self.kind.apply(h)


class Model(paddle.nn.Layer):
    """Three blocks and a head with eight numbers a row."""

    def __init__(self, make_block: Callable[[], paddle.nn.Layer] = Block) -> None:
        super().__init__()
        self.blocks = paddle.nn.LayerList([make_block() for _ in range(3)])
        self.head = paddle.nn.Linear(WIDTH, 8)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Smooth(paddle.nn.Layer):
    """A block whose operators can be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.linear(x).tanh()


class Norm(paddle.nn.Sequential):
    """A block with BatchNorm and Dropout."""

    def __init__(self) -> None:
        linear = paddle.nn.Linear(WIDTH, WIDTH)
        super().__init__(linear, paddle.nn.BatchNorm1D(WIDTH), paddle.nn.Dropout(0.1))


class Sequence(paddle.nn.Layer):
    """A recurrent Layer of two levels, over eight texts."""

    def __init__(self, kind: type[paddle.nn.Layer]) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, num_layers=2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.inner(x.reshape([8, -1, WIDTH]))[0]


class Router(paddle.nn.Layer):
    """A block that keeps its auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)
        self.router = paddle.nn.Linear(WIDTH, 4)
        self.loss: Any = None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        weights = paddle.nn.functional.softmax(self.router(x))
        self.loss = weights.mean(0).square().sum()
        return x + self.linear(x) * weights[:, :1]


class Cached(Block):
    """A block with a cache; under `no_grad`, the mean of what the cache has had so far."""

    def forward(self, x: paddle.Tensor, cache: list[paddle.Tensor]) -> paddle.Tensor:
        h = super().forward(x)
        if not paddle.is_grad_enabled():
            cache.append(h)
            h = paddle.add_n(cache) / len(cache)
        return h


def entropy(h: paddle.Tensor) -> paddle.Tensor:
    """That of the softmax of `h`."""
    p = paddle.nn.functional.softmax(h)
    return -(p * p.log()).sum()


class SavesInput(PyLayer):
    """A tanh that saves its input."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return gradient * (1 - ctx.saved_tensor()[0].tanh().square())


class SavesOutput(PyLayer):
    """A tanh that saves its output."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return gradient * (1 - ctx.saved_tensor()[-1].square())


class SavesBoth(SavesOutput):
    """A tanh that saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        y = x.tanh()
        ctx.save_for_backward(x, y)
        return y


class Failing(PyLayer):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        raise KeyError
