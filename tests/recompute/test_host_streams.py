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
Linear = paddle.nn.Linear
Patch = pytest.MonkeyPatch


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
        lambda: paddle.nn.Sequential(Linear(4, 4), paddle.nn.GELU()),
    ],
)
def test_they_are_not_read_for_layers_of_paddle(make: Any, monkeypatch: Patch) -> None:
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


def member(use: Callable[[Any, Tensor], Tensor]) -> paddle.nn.Layer:
    return Using(WithMembers(), use)


TOOLS = types.SimpleNamespace(draw=np.random.rand)
FUNCTIONS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "a global": lambda: noisy,
    "functions of NumPy": lambda: (
        lambda x: x * paddle.full([4], drawn_from_numpy() * drawn_from_python())
    ),
    "an object": lambda: lambda x: x * paddle.full([4], TOOLS.draw()),
    "a closure": lambda: (lambda draw: lambda x: x * paddle.full([4], draw()))(np.random.rand),
    "an import": lambda: by_an_import,
    "getattr": lambda: by_getattr,
    "an argument": lambda: by_an_argument,
    "a property": lambda: member(lambda layer, x: x * layer.noise),
    "another method": lambda: member(lambda layer, x: layer.noisy(x)),
    "a special method": lambda: member(lambda layer, x: layer + x),
    "a member that is NumPy's": lambda: member(lambda layer, x: x * float(layer.drawn())),
    "a partial": lambda: member(lambda layer, x: x * float(layer.also_drawn())),
}


@pytest.mark.parametrize("way", FUNCTIONS)
def test_functions_that_draw_from_them(way: str) -> None:
    check(FUNCTIONS[way]())


class Activated(paddle.nn.Layer):
    """A constant of its class is None until somebody sets it."""

    activation: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if self.activation is None else self.activation(x)


class Base(paddle.nn.Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Derived(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Functional(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([4, 4])

    def forward(self, x: Tensor) -> Tensor:
        functional = paddle.nn.functional
        if hasattr(functional, "first"):
            return functional.first(x)
        return functional.linear(x, self.weight)


def disappears(block: Any, patch: Patch) -> None:
    """The function that was called first is no longer there, another one is replaced."""
    patch.delattr(paddle.nn.functional, "first")
    patch.setattr(paddle.nn.functional, "linear", lambda x, w: linear(noisy(x), w))


def hides(block: Any, patch: Patch) -> None:
    """A Layer that no search finds: the search does not look into tensors."""
    block.weight.hidden = Using(block, lambda _, x: noisy(x))
    block.forward = lambda x: block.weight.hidden(x)


REPLACED: dict[str, tuple[Callable[[], Any], Callable[[Any, Patch], None]]] = {
    "the forward of a class of Paddle": (
        lambda: Linear(4, 4),
        lambda block, patch: patch.setattr(Linear, "forward", lambda self, x: noisy(x) + self.bias),
    ),
    "the forward of one Layer": (
        lambda: Linear(4, 4),
        lambda block, patch: patch.setattr(block, "forward", lambda x: noisy(x) + block.bias),
    ),
    "the forward of a base": (
        Derived, lambda block, patch: patch.setattr(Base, "forward", lambda self, x: noisy(x)),
    ),
    "a constant that becomes a method": (
        Activated,
        lambda block, patch: patch.setattr(Activated, "activation", lambda self, x: noisy(x)),
    ),
    "a function of Paddle": (
        Functional,
        lambda block, patch: patch.setattr(
            paddle.nn.functional, "linear", lambda x, w: linear(noisy(x), w)
        ),
    ),
    "a function of Paddle that disappears": (Functional, disappears),
    "a method of tensors": (
        lambda: Using(Base(), lambda _, x: x.noisy() if hasattr(x, "noisy") else x),
        lambda block, patch: patch.setattr(paddle.Tensor, "noisy", noisy, raising=False),
    ),
    "a hook": (
        lambda: Linear(4, 4),
        lambda block, patch: block.register_forward_post_hook(lambda layer, x, y: noisy(y)),
    ),
    "a Layer that no search finds": (lambda: Linear(4, 4), hides),
}  # fmt: skip
"""A block, and what begins to draw once all that is known of its class is found."""


@pytest.mark.parametrize("what", REPLACED)
def test_what_begins_to_draw(what: str, monkeypatch: Patch) -> None:
    make, replace = REPLACED[what]
    if "disappears" in what:
        monkeypatch.setattr(paddle.nn.functional, "first", lambda x: x.tanh(), raising=False)
    block = make()
    recompute(block, leaf(3, 4)).sum().backward()
    replace(block, monkeypatch)
    check(block)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_layer_of_paddle_whose_function_was_replaced(
    is_wrapped: bool, monkeypatch: Patch
) -> None:
    block = Linear(4, 4)
    assert not CapturedState(block, ()).may_draw
    wraps = functools.wraps(linear) if is_wrapped else lambda function: function
    drawing = wraps(lambda x, **named: linear(noisy(x), **named))
    monkeypatch.setattr(paddle.nn.functional, "linear", drawing)
    check(block)
