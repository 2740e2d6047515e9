"""Layers that no search from the function finds: met when they are called."""

from __future__ import annotations

import collections
import contextvars
import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import paddle
import pytest

from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import recompute
from tests.recompute.contract import Run, Seen, WarmingUp, assert_as_plain, case, leaf


def network() -> paddle.nn.Layer:
    return paddle.nn.Sequential(
        paddle.nn.Linear(4, 4), paddle.nn.BatchNorm1D(4), paddle.nn.Dropout(0.3)
    )


class Encoder(paddle.nn.Layer):
    """Holds its parts in a list, and is called by another name than forward."""

    def __init__(self, part: paddle.nn.Layer) -> None:
        super().__init__()
        self.parts = [part]

    def encode(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.parts[0](x)


class OfClass:
    """Its entries are in an attribute of the class, by name, as plugins are."""

    entries: ClassVar[dict[str, paddle.nn.Layer]] = {}


CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("current")
MODULE = types.ModuleType("a_module_of_a_user")


def imported(x: paddle.Tensor) -> paddle.Tensor:
    from a_module_of_a_user import layer

    return layer(x)


Function = Callable[[paddle.Tensor], paddle.Tensor]


def found_in(where: str, layer: paddle.nn.Layer) -> Function:
    """A function that finds `layer` when it is called."""
    weak, held = weakref.ref(layer), collections.deque([layer])
    sys.modules["a_module_of_a_user"], MODULE.layer = MODULE, layer
    CURRENT.set(layer)
    OfClass.entries["layer"] = layer
    getter = functools.lru_cache(lambda: weak())
    functions: dict[str, Function] = {
        "in a registry": lambda x: OfClass.entries["layer"](x),
        "behind a weak reference": lambda x: weak()(x),  # type: ignore[misc]
        "imported in the function": imported,
        "in a context variable": lambda x: CURRENT.get()(x),
        "given by a cached getter": lambda x: getter()(x),
        "in a list, used by a method": Encoder(layer).encode,
        "in a deque": lambda x: held[0](x),
    }
    return functions[where]


CALLED = [
    "in a registry", "behind a weak reference", "imported in the function",
    "in a context variable", "given by a cached getter",
]  # fmt: skip
"""Where the search does not find the Layer."""
every = pytest.mark.parametrize("where", [*CALLED, "in a list, used by a method", "in a deque"])


@case("a Layer {where} that counts in Python beside its buffer", where=CALLED)
def test_numbers_beside_buffers(run: Run, where: str) -> Seen:
    layer, x, losses = paddle.nn.Sequential(paddle.nn.Linear(4, 4), WarmingUp()), leaf(6, 4), []
    function = found_in(where, layer)
    for _ in range(3):
        losses.append(run(function, x * 2).square().sum())
        losses[-1].backward()
    return {"x": x, "layer": layer, "calls": layer[1].calls, "losses": losses}


@every
def test_buffers_move_once_and_masks_flags_and_numbers_are_those_of_the_first_forward(
    where: str,
) -> None:
    def outcome(run: Run) -> list[Any]:
        layer, x = network(), leaf(6, 4)
        function = found_in(where, layer)
        run(function, x * 2).square().sum().backward()
        y = run(function, x * 3).square().sum()
        layer.eval()
        layer[2].p = 0.9
        y.backward()
        assert not any(one.training for one in layer.sublayers(include_self=True))
        return [x, layer, layer[2].p]

    assert_as_plain(outcome)


@every
def test_an_update_before_the_backward_is_refused(where: str) -> None:
    layer = network()
    y = recompute(found_in(where, layer), leaf(6, 4) * 2).square().sum()
    layer[0].weight.set_value(paddle.zeros([4, 4]))
    with pytest.raises(RecomputeError, match="was changed between the forward and the backward"):
        y.backward()


def test_another_layer_in_its_place_is_refused() -> None:
    first = network()
    y = recompute(found_in("imported in the function", first), leaf(6, 4) * 2).square().sum()
    MODULE.layer = network()
    with pytest.raises(RecomputeError, match=r"calls the Layer '.*', which the first one did not"):
        y.backward()


def test_a_layer_that_the_function_makes_itself_is_known() -> None:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.Sequential(paddle.nn.Tanh(), paddle.nn.Softmax())(x)

    def outcome(run: Run) -> list[Any]:
        x = leaf(6, 4)
        run(function, x).square().sum().backward()
        return [x]

    assert_as_plain(outcome)
