"""The blocks and models of `benchmarks.memory.leaks`."""

from __future__ import annotations

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
        """The same shape."""
        h = self.act(self.linear(self.norm(x)))
        return h if self.kind is None else self.kind.apply(h)


class Model(paddle.nn.Layer):
    """Three blocks and a head."""

    def __init__(self, kind: type[PyLayer] | None = None) -> None:
        super().__init__()
        self.blocks = paddle.nn.LayerList([Block(kind) for _ in range(3)])
        self.head = paddle.nn.Linear(WIDTH, 8)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """Eight numbers a row."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Smooth(paddle.nn.Layer):
    """A block whose operators can be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """The same shape."""
        return self.linear(x).tanh()


class Router(paddle.nn.Layer):
    """A block that keeps its auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(WIDTH, WIDTH)
        self.router = paddle.nn.Linear(WIDTH, 4)
        self.loss: Any = None

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """The same shape."""
        weights = paddle.nn.functional.softmax(self.router(x))
        self.loss = weights.mean(0).square().sum()
        return x + self.linear(x) * weights[:, :1]


class Cached(Block):
    """A block with a cache."""

    def forward(self, x: paddle.Tensor, cache: list[paddle.Tensor]) -> paddle.Tensor:
        """The mean of what the cache has had so far, in the same shape."""
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
        """The tanh."""
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        """Its gradient."""
        (x,) = ctx.saved_tensor()
        return gradient * (1 - x.tanh().square())


class SavesOutput(PyLayer):
    """A tanh that saves its output."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        """The tanh."""
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        """Its gradient."""
        (y,) = ctx.saved_tensor()
        return gradient * (1 - y.square())


class SavesBoth(PyLayer):
    """A tanh that saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        """The tanh."""
        y = x.tanh()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        """Its gradient."""
        _, y = ctx.saved_tensor()
        return gradient * (1 - y.square())


class Failing(PyLayer):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        """A copy."""
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        """None."""
        raise KeyError
