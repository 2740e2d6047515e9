"""The operations of random dygraph programs: each takes tensors of any shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle.nn import functional as F

Tensor = paddle.Tensor


def rows(x: Tensor) -> Tensor:
    """`x` as rows of 4 numbers, two at least."""
    if len(x.shape) >= 2 and x.shape[-1] == 4 and x.size >= 8:
        return x
    return x.mean().reshape([1, 1]).expand([2, 4]) + paddle.arange(8.0).reshape([2, 4])


def along(x: Tensor, axis: int, what: Any) -> Tensor:
    """`x` indexed by `what` along `axis`."""
    if not x.shape:
        return x.reshape([1])
    place: list[Any] = [slice(None)] * len(x.shape)
    place[axis % len(x.shape)] = what
    return x[tuple(place)]


def longest(x: Tensor) -> int:
    return int(np.argmax(x.shape)) if x.shape else 0


def turn(x: Tensor, by: int) -> Tensor:
    rank = len(x.shape)
    return x.transpose([(axis + 1 + by) % rank for axis in range(rank)]) if rank > 1 else x * 1


def own(x: Tensor) -> Tensor:
    return x * 1


def add_to_view(x: Tensor) -> Tensor:
    copy = own(x)
    view = along(copy, longest(copy), slice(0, 1))
    view.add_(paddle.ones([1]))
    return copy


def set_item(x: Tensor, y: Tensor) -> Tensor:
    if not x.shape:
        return x + y.mean()
    copy = own(x)
    copy[0] = y.mean()
    return copy


def spoil(x: Tensor) -> Tensor:
    """What autograd refuses: the square's operand changes after it was saved."""
    copy = own(x)
    square = copy * copy
    copy.add_(paddle.ones([1]))
    return square + copy


def hooked(x: Tensor, by: int) -> Tensor:
    result = own(x)
    if not result.stop_gradient:
        result.register_hook(lambda gradient: gradient * (0.5 + by) + 0.1)
    return result


def hook_here(x: Tensor, by: int) -> Tensor:
    if not x.stop_gradient:
        x.register_hook(lambda gradient: gradient * (1.5 + by))
    return x.tanh()


def without_gradient(x: Tensor) -> Tensor:
    with paddle.no_grad():
        return x * 2


def stopped(x: Tensor) -> Tensor:
    result = own(x)
    result.stop_gradient = True
    return result


def pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x, y) if x.shape == y.shape else (x, y.mean())


def attend(x: Tensor, y: Tensor) -> Tensor:
    x, y = rows(x).reshape([-1, 4]), rows(y).reshape([-1, 4])
    return F.softmax(x @ y.transpose([1, 0]) * 0.3) @ y


def heads(x: Tensor, by: int) -> Tensor:
    parts = rows(x).reshape([-1, 2, 2]).transpose([1, 0, 2])
    return paddle.unbind(parts, axis=0)[by % 2]


def best(x: Tensor, by: int) -> Tensor:
    """What a router chooses: integers, and the weights that belong to them."""
    scores = F.softmax(rows(x))
    weights, chosen = scores.topk(2, axis=-1)
    return weights.sum() * rows(x).reshape([-1])[chosen.reshape([-1])]


def sampled(x: Tensor, by: int) -> Tensor:
    score = F.softmax(rows(x).reshape([-1, 4])).detach()
    return x * (1 + paddle.multinomial(score, 1).astype("float32").mean() * 0.1)


class Remembering(paddle.nn.Layer):
    """Reads and writes a buffer, and assigns a tensor to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", paddle.zeros([4]))
        self.last = paddle.zeros([4])

    def forward(self, x: Tensor) -> Tensor:
        with paddle.no_grad():
            self.mean.set_value(self.mean * 0.5 + x.reshape([-1, 4]).mean(0))
        before, self.last = self.last, x.detach().reshape([-1, 4]).mean(0)
        return x * (1 + self.mean.clone()) + before


class Turned(paddle.autograd.PyLayer):
    """Saves a transposed tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(turn(x, 0))
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensor()
        rank = len(x.shape)
        return gradient * 2 * (x.transpose([(axis - 1) % rank for axis in range(rank)]))


SMOOTH: dict[str, Callable[[Tensor, int], Tensor]] = {
    "tanh": lambda x, by: x.tanh(),
    "exp": lambda x, by: (x * 0.2).clip(-3, 3).exp(),
    "square": lambda x, by: x * x * 0.5,
    "gelu": lambda x, by: F.gelu(x),
    "softmax": lambda x, by: F.softmax(x) if x.shape else F.sigmoid(x),
    "mean": lambda x, by: x.mean(-1, keepdim=True) if x.shape else own(x),
    "narrow": lambda x, by: x.astype("float64").tanh().astype("float32"),
    "best": best,
}
VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "turn": turn,
    "tail": lambda x, by: along(x, longest(x), slice(1, None)) if x.size > 1 else x * 1,
    "every second": lambda x, by: along(x, longest(x), slice(by % 2, None, 2)) if x.size > 1 else x,
    "one": lambda x, by: along(x, by, 0) if x.shape else x,
    "real": lambda x, by: paddle.real(paddle.complex(x, x * 0.5)),
    "imaginary": lambda x, by: paddle.imag(paddle.complex(x * 0.5, x)),
    "expand": lambda x, by: x.unsqueeze(0).expand([2, *x.shape]) if x.size < 64 else own(x),
    "flat": lambda x, by: x.reshape([-1]),
    "fold": lambda x, by: x.reshape([2, -1]) if x.size % 2 == 0 and x.size else own(x),
    "last half": lambda x, by: (
        paddle.split(x, 2, axis=-1)[1] if x.shape and x.shape[-1] % 2 == 0 else own(x)
    ),
    "diagonal": lambda x, by: paddle.diagonal(x, axis1=-2, axis2=-1) if len(x.shape) > 1 else x * 1,
    "flip": lambda x, by: x.flip([by % len(x.shape)]) if x.shape else own(x),
    "head": heads,
}
IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda x, y: own(x).add_(y.mean()),
    "tanh_": lambda x, y: own(x).tanh_(),
    "scale_": lambda x, y: own(x).scale_(0.7),
    "add_ to a view": lambda x, y: add_to_view(x),
    "set an item": set_item,
    "spoil": lambda x, y: spoil(x),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: paddle.add(*pair(x, y)),
    "times": lambda x, y: paddle.multiply(*pair(x, y.tanh())),
    "attend": attend,
    "where": lambda x, y: paddle.where(x > 0, x, x * y.mean()),
}
GRADIENTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "hooked": hooked,
    "hook here": hook_here,
    "detach": lambda x, by: x.detach() * x,
    "no grad": lambda x, by: without_gradient(x),
    "stopped": lambda x, by: stopped(x),
    "PyLayer": lambda x, by: Turned.apply(x) if x.shape else x * x,
}
RANDOM: dict[str, Callable[[Tensor, int], Tensor]] = {
    "noise": lambda x, by: x * (paddle.rand(x.shape) + 0.5),
    "NumPy noise": lambda x, by: x * float(np.random.rand()),
    "Python noise": lambda x, by: x * random.random(),
    "dropout": lambda x, by: F.dropout(x, 0.3),
    "sampled": sampled,
}
LAYERS: dict[str, Callable[[], paddle.nn.Layer]] = {
    "Linear": lambda: paddle.nn.Linear(4, 4),
    "remembering": Remembering,
    "BatchNorm": lambda: paddle.nn.BatchNorm1D(4),
    "LayerNorm": lambda: paddle.nn.LayerNorm(4),
    "Dropout": lambda: paddle.nn.Dropout(0.4),
    "LSTM": lambda: paddle.nn.LSTM(4, 4),
    "GRU": lambda: paddle.nn.GRU(4, 2, direction="bidirect"),
    "spectral norm": lambda: paddle.nn.utils.spectral_norm(paddle.nn.Linear(4, 4)),
    "weight norm": lambda: paddle.nn.utils.weight_norm(paddle.nn.Linear(4, 4)),
    "attention": lambda: paddle.nn.MultiHeadAttention(4, 2, dropout=0.2),
}
