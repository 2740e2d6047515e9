"""NumPy's stream and Python's are read only where the function can reach them."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from random import random as drawn_from_python
from typing import Any

import numpy as np
import paddle
import pytest
from numpy.random import rand as drawn_from_numpy
from paddle import Tensor

from paddle_recompute import recompute
from paddle_recompute.replay.reach import Reach
from tests.recompute.contract import leaf

linear = paddle.nn.functional.linear


def noisy(x: Tensor) -> Tensor:
    return x * paddle.full([4], np.random.rand() * random.random())


class Plain(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.norm = paddle.nn.BatchNorm1D(4)
        self.dropout = paddle.nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return paddle.nn.functional.gelu(self.dropout(self.norm(self.linear(x)))) + x.square()


def check(block: Callable[[Tensor], Tensor], x: Tensor | None = None) -> None:
    """The gradient is that of the plain call; `block` must draw."""
    gradients, ends = [], []
    for run in (lambda f, x: f(x), recompute):
        paddle.seed(1), np.random.seed(1), random.seed(1)  # type: ignore[func-returns-value]
        x = leaf(3, 4)
        run(block, x * 2).square().sum().backward()
        gradients.append(x.grad.numpy())
        ends.append((np.random.rand(), random.random()))
    assert gradients[0].tobytes() == gradients[1].tobytes()
    assert ends[0] == ends[1]
    np.random.seed(1)
    assert np.random.rand() != ends[0][0]


@pytest.mark.parametrize(
    "make",
    [
        Plain,
        lambda: paddle.nn.TransformerEncoderLayer(4, 2, 8),
        lambda: paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.GELU()),
    ],
)
def test_they_are_not_read_for_layers_of_paddle(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    block, x = make(), leaf(2, 4) if make is Plain else leaf(2, 2, 4)
    reads: list[None] = []
    monkeypatch.setattr(np.random, "get_state", lambda *_: reads.append(None))
    monkeypatch.setattr(random, "getstate", lambda: reads.append(None))
    recompute(block, x).sum().backward()
    assert not reads


def through_a_global(monkeypatch: pytest.MonkeyPatch) -> Any:
    return noisy


def through_numpy_functions(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda x: x * paddle.full([4], drawn_from_numpy() * drawn_from_python())


def through_a_closure(monkeypatch: pytest.MonkeyPatch) -> Any:
    draw = np.random.rand
    return lambda x: x * paddle.full([4], draw())


def through_an_import(monkeypatch: pytest.MonkeyPatch) -> Any:
    def block(x: Tensor) -> Tensor:
        from numpy import random as stream

        return x * paddle.full([4], stream.rand())

    return block


def through_an_object(monkeypatch: pytest.MonkeyPatch) -> Any:
    tools = types.SimpleNamespace(draw=np.random.rand)
    return lambda x: x * paddle.full([4], tools.draw())


def through_getattr(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = ["random", "rand"]

    def block(x: Tensor) -> Tensor:
        return x * paddle.full([4], getattr(getattr(np, names[0]), names[1])())

    return block


def through_an_argument(monkeypatch: pytest.MonkeyPatch) -> Any:
    def block(x: Tensor, draw: Any = np.random.rand) -> Tensor:
        return x * paddle.full([4], draw())

    return block


def through_a_method_of_a_class_of_paddle(monkeypatch: pytest.MonkeyPatch) -> Any:
    block = paddle.nn.Linear(4, 4)
    recompute(block, leaf(3, 4)).sum().backward()  # what is known of the class is found
    monkeypatch.setattr(paddle.nn.Linear, "forward", lambda self, x: noisy(x) + self.bias)
    return block


def through_another_method_of_it(monkeypatch: pytest.MonkeyPatch) -> Any:
    layer = paddle.nn.MultiHeadAttention(4, 2)
    before = paddle.nn.MultiHeadAttention._prepare_qkv

    def block(x: Tensor) -> Tensor:
        return layer(x.unsqueeze(0)).squeeze(0)

    recompute(block, leaf(3, 4)).sum().backward()

    def prepared(self: Any, query: Tensor, *rest: Any) -> Any:
        return before(self, noisy(query), *rest)

    monkeypatch.setattr(paddle.nn.MultiHeadAttention, "_prepare_qkv", prepared)
    return block


def through_a_method_of_one_layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    block = paddle.nn.Linear(4, 4)
    recompute(block, leaf(3, 4)).sum().backward()
    block.forward = lambda x: noisy(x) + block.bias
    return block


def through_a_method_of_a_base(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Base(paddle.nn.Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Derived(Base):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    block = Derived()
    recompute(block, leaf(3, 4)).sum().backward()
    monkeypatch.setattr(Base, "forward", lambda self, x: noisy(x))
    return block


def through_a_function_of_paddle(monkeypatch: pytest.MonkeyPatch) -> Any:
    block = paddle.nn.Linear(4, 4)
    recompute(block, leaf(3, 4)).sum().backward()
    monkeypatch.setattr(paddle.nn.functional, "linear", lambda x, w: linear(noisy(x), w))
    return lambda x: paddle.nn.functional.linear(x, block.weight) + block.bias


def through_a_method_of_tensors(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(paddle.Tensor, "noisy", noisy, raising=False)
    return lambda x: x.noisy()


def through_a_hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    block = paddle.nn.Linear(4, 4)
    block.register_forward_post_hook(lambda layer, x, y: noisy(y))
    return block


def through_a_special_method(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Block(paddle.nn.Layer):
        def __add__(self, x: Tensor) -> Tensor:
            return noisy(x)

        def forward(self, x: Tensor) -> Tensor:
            return self + x

    return Block()


def through_an_attribute_of_the_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Block(paddle.nn.Layer):
        draw = np.random.rand

        def forward(self, x: Tensor) -> Tensor:
            return x * paddle.full([4], self.draw())

    return Block()


def through_a_layer_that_no_search_finds(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Hidden(paddle.nn.Layer):
        def forward(self, x: Tensor) -> Tensor:
            return noisy(x)

    block = paddle.nn.Linear(4, 4)
    block.weight.hidden = Hidden()  # the search does not look into tensors
    parameter = block.weight
    return lambda x: parameter.hidden(x)


WAYS = [value for name, value in dict(globals()).items() if name.startswith("through_")]


@pytest.mark.parametrize("way", WAYS, ids=[way.__name__[8:] for way in WAYS])
def test_what_draws_from_them_draws_the_same_again(
    way: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(way(monkeypatch))


def test_a_layer_of_paddle_whose_function_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    block = paddle.nn.Linear(4, 4)
    assert not Reach(block, ()).may_draw
    monkeypatch.setattr(
        paddle.nn.functional, "linear", lambda x, **named: linear(noisy(x), **named)
    )
    check(block)
