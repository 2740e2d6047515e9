"""NumPy's stream and Python's are read only where the function can reach them."""

from __future__ import annotations

import functools
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
from paddle_recompute.captured_state.captured_state import CapturedState
from tests.recompute.contract import Run, Seen, Using, assert_as_plain, clean_streams, leaf, plain

linear = paddle.nn.functional.linear


def noisy(x: Tensor) -> Tensor:
    return x * paddle.full([4], np.random.rand() * random.random())


def check(block: Callable[[Tensor], Tensor]) -> None:
    """It computes what the plain call does; `block` must draw from NumPy's stream."""

    def outcome(run: Run) -> Seen:
        x = leaf(3, 4)
        run(block, x * 2).square().sum().backward()
        return {"x": x}

    assert_as_plain(outcome)
    with clean_streams():
        before = np.random.rand()
    with clean_streams():
        outcome(plain)
        assert np.random.rand() != before


@pytest.mark.parametrize(
    "make",
    [
        lambda: paddle.nn.Sequential(paddle.nn.BatchNorm1D(2), paddle.nn.Dropout(0.5)),
        lambda: paddle.nn.TransformerEncoderLayer(4, 2, 8),
        lambda: paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.GELU()),
    ],
)
def test_they_are_not_read_for_layers_of_paddle(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    block, x = make(), leaf(2, 2, 4)
    reads: list[None] = []
    monkeypatch.setattr(np.random, "get_state", lambda *_: reads.append(None))
    monkeypatch.setattr(random, "getstate", lambda: reads.append(None))
    recompute(block, x).sum().backward()
    assert not reads


def by_an_import(x: Tensor) -> Tensor:
    from numpy import random as stream

    return x * paddle.full([4], stream.rand())


def by_getattr(x: Tensor, names: tuple[str, str] = ("random", "rand")) -> Tensor:
    return x * paddle.full([4], getattr(getattr(np, names[0]), names[1])())


def by_an_argument(x: Tensor, draw: Any = np.random.rand) -> Tensor:
    return x * paddle.full([4], draw())


TOOLS = types.SimpleNamespace(draw=np.random.rand)
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a global": noisy,
    "functions of NumPy": lambda x: x * paddle.full([4], drawn_from_numpy() * drawn_from_python()),
    "an object": lambda x: x * paddle.full([4], TOOLS.draw()),
    "a closure": (lambda draw: lambda x: x * paddle.full([4], draw()))(np.random.rand),
    "an import": by_an_import,
    "getattr": by_getattr,
    "an argument": by_an_argument,
}


@pytest.mark.parametrize("way", FUNCTIONS)
def test_functions_that_draw_from_them(way: str) -> None:
    check(FUNCTIONS[way])


class WithMembers(paddle.nn.Layer):
    """Members that draw, whose code can be read or not."""

    drawn = staticmethod(np.random.rand)
    also_drawn = classmethod(functools.partial(lambda scale, _: scale * np.random.rand(), 3))

    @property
    def noise(self) -> float:
        return random.random() + float(np.random.rand())

    def noisy(self, x: Tensor) -> Tensor:
        return noisy(x)

    def __add__(self, x: Tensor) -> Tensor:
        return noisy(x)


MEMBERS: dict[str, Callable[[WithMembers, Tensor], Tensor]] = {
    "a property": lambda layer, x: x * layer.noise,
    "another method": lambda layer, x: layer.noisy(x),
    "a special method": lambda layer, x: layer + x,
    "a function of NumPy": lambda layer, x: x * float(layer.drawn()),
    "a partial": lambda layer, x: x * float(layer.also_drawn()),
}


@pytest.mark.parametrize("way", MEMBERS)
def test_members_of_a_layer_that_draw_from_them(way: str) -> None:
    check(Using(WithMembers(), MEMBERS[way]))


class Activated(paddle.nn.Layer):
    """A constant of its class is None until somebody sets it."""

    activation: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if self.activation is None else self.activation(x)


def through_a_constant_that_becomes_a_method(monkeypatch: pytest.MonkeyPatch) -> Any:
    recompute(Activated(), leaf(3, 4)).sum().backward()
    monkeypatch.setattr(Activated, "activation", lambda self, x: noisy(x))
    return Activated()


def through_a_function_that_appears_in_paddle(monkeypatch: pytest.MonkeyPatch) -> Any:
    functional = paddle.nn.functional

    def block(x: Tensor) -> Tensor:
        return functional.first(x) if hasattr(functional, "first") else functional.second(x)

    monkeypatch.setattr(functional, "first", lambda x: x.tanh(), raising=False)
    recompute(block, leaf(3, 4)).sum().backward()
    monkeypatch.delattr(functional, "first")
    monkeypatch.setattr(functional, "second", noisy, raising=False)
    return block


class Base(paddle.nn.Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Derived(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


FORWARDS: dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "of a class of Paddle": (
        lambda: paddle.nn.Linear(4, 4),
        lambda block: (type(block), lambda self, x: noisy(x) + self.bias),
    ),
    "of one Layer": (
        lambda: paddle.nn.Linear(4, 4),
        lambda block: (block, lambda x: noisy(x) + block.bias),
    ),
    "of a base": (Derived, lambda block: (Base, lambda self, x: noisy(x))),
}
"""A block, and which forward is replaced by what, once all that is known of its class is found."""


@pytest.mark.parametrize("what", FORWARDS)
def test_a_forward_that_is_replaced(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, replacement = FORWARDS[what]
    block = make()
    recompute(block, leaf(3, 4)).sum().backward()
    owner, forward = replacement(block)
    monkeypatch.setattr(owner, "forward", forward)
    check(block)


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


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_layer_of_paddle_whose_function_was_replaced(
    is_wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = paddle.nn.Linear(4, 4)
    assert not CapturedState(block, ()).may_draw
    wraps = functools.wraps(linear) if is_wrapped else lambda function: function
    drawing = wraps(lambda x, **named: linear(noisy(x), **named))
    monkeypatch.setattr(paddle.nn.functional, "linear", drawing)
    check(block)
