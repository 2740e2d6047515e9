"""Tensors that are views: strides and offsets survive recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest

from paddle_recompute.recompute import recompute
from tests.recompute.contract import Run, Seen, case, leaf, plain, step

View = Callable[[paddle.Tensor], paddle.Tensor]

VIEWS: dict[str, View] = {
    "transposed": lambda h: h.transpose([1, 0, 2]),
    "all turned": lambda h: h.transpose([2, 1, 0]),
    "without the first": lambda h: h[1:],
    "one row": lambda h: h[:, 1],
    "real part": lambda h: paddle.real(paddle.complex(h, h * 2)),
    "imaginary part": lambda h: paddle.imag(paddle.complex(h, h * 2)),
    "split": lambda h: paddle.split(h, 2, axis=-1)[1],
    "expanded": lambda h: h[:, :1].expand([4, 6, 4]),
    "reshaped after a turn": lambda h: h.transpose([1, 0, 2]).reshape([6, -1]),
    "as_strided": lambda h: paddle.as_strided(h, [3, 4], [1, 5], 4),
    "rows behind rows": lambda h: h[1:][:, 1:][..., 1:],
}


def net() -> tuple[paddle.nn.Layer, paddle.nn.Layer, paddle.Tensor]:
    return paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4), leaf(4, 6, 4)


@case("a view handed to a block: {view}", view=list(VIEWS), num_listed=3)
def test_argument(run: Run, view: str) -> Seen:
    first, _, x = net()
    y = run(lambda t: (t * t).tanh(), VIEWS[view](first(x)))
    y.square().sum().backward()
    return {"y": y, "x": x, "first": first}


@case("a view handed to an inner block: {view}", view=list(VIEWS), num_listed=3)
def test_argument_of_an_inner_block(run: Run, view: str) -> Seen:
    first, second, x = net()

    def outer(x: paddle.Tensor) -> paddle.Tensor:
        h = run(lambda t: (t * t).tanh(), VIEWS[view](first(x)))
        return h * VIEWS[view](second(x)).exp()

    y = run(outer, x * 2)
    y.sum().backward()
    return {"y": y, "x": x, "first": first, "second": second}


@case("a view saved by operators of a block: {view}", view=list(VIEWS), num_listed=3)
def test_saved(run: Run, view: str) -> Seen:
    first, second, x = net()

    def block(x: paddle.Tensor) -> paddle.Tensor:
        h = VIEWS[view](first(x))
        return h * h * h.tanh() * VIEWS[view](second(x))

    y = run(block, x * 2)
    y.sum().backward()
    return {"y": y, "x": x, "first": first, "second": second}


@case("a view returned by a block: {view}", view=list(VIEWS), num_listed=3)
def test_output(run: Run, view: str) -> Seen:
    first, _, x = net()
    y = run(lambda t: VIEWS[view](first(t).tanh()), x * 2)
    z = run(lambda t: t * t, y)
    z.sum().backward()
    return {"y": y, "z": z, "x": x, "first": first}


@case("attention whose heads are handed to an inner block")
def test_heads(run: Run) -> Seen:
    qkv, out, x = paddle.nn.Linear(8, 24), paddle.nn.Linear(8, 8), leaf(2, 5, 8)

    def attend(q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor) -> paddle.Tensor:
        weights = paddle.nn.functional.softmax(q @ k.transpose([0, 1, 3, 2]) * 0.5)
        return paddle.nn.functional.dropout(weights, 0.2) @ v

    def block(x: paddle.Tensor) -> paddle.Tensor:
        heads = qkv(x).reshape([2, 5, 3, 2, 4]).transpose([2, 0, 3, 1, 4])
        mixed = run(attend, *paddle.unbind(heads, axis=0))
        return x + out(mixed.transpose([0, 2, 1, 3]).reshape([2, 5, 8]))

    y = run(block, run(block, x * 2))
    y.square().sum().backward()
    return {"y": y, "x": x, "qkv": qkv, "out": out}


class SavesATurned(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, view: View) -> paddle.Tensor:
        ctx.save_for_backward(view(x), view(x.exp()))
        return view(x) * view(x.exp())

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        x, e = ctx.saved_tensor()
        assert x.strides != sorted(x.strides, reverse=True)
        return (gradient * (e + x * e)).transpose([1, 0, 2])


@case("a PyLayer that saves a transposed tensor")
def test_py_layer(run: Run) -> Seen:
    first, _, x = net()
    y = run(lambda x: SavesATurned.apply(first(x), VIEWS["transposed"]).tanh(), x * 2)
    y.sum().backward()
    return {"y": y, "x": x, "first": first}


class Scaled(paddle.nn.Layer):
    def __init__(self, view: View) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.register_buffer("scale", view(leaf(4, 6, 4, stop_gradient=True)))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return (self.linear(x).sum() * self.scale).tanh() * self.scale


@case("a buffer that is a view: {view}", view=list(VIEWS), num_listed=2)
def test_buffer(run: Run, view: str) -> Seen:
    block, x = Scaled(VIEWS[view]), leaf(2, 4)
    y = run(block, x * 2)
    y.sum().backward()
    return {"y": y, "x": x, "block": block}


@pytest.mark.parametrize("run", [plain, recompute], ids=["plain", "recompute"])
def test_a_tensor_without_memory_may_be_saved(run: Run) -> None:
    """The forward of an LSTM in eval mode; Paddle cannot differentiate it, and says so."""
    lstm, x = paddle.nn.LSTM(4, 4), leaf(2, 3, 4)
    lstm.eval()
    y = run(lambda x: lstm(x)[0], x * 2)
    with pytest.raises(RuntimeError, match="Tensor holds no memory"):
        y.sum().backward()


@case("einsum, which saves empty tensors on 2.6", num_listed=0)
def test_einsum(run: Run) -> Seen:
    weight = leaf(4, 5)

    def contract(x: paddle.Tensor) -> paddle.Tensor:
        return paddle.einsum("bij,jk->bik", x, weight).tanh()

    return {**step(run, contract, leaf(2, 3, 4)), "weight": weight}
