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
from tests.recompute.contract import Run, Seen, assert_as_plain, case, leaf


def network() -> paddle.nn.Layer:
    paddle.seed(3)
    return paddle.nn.Sequential(
        paddle.nn.Linear(4, 4), paddle.nn.BatchNorm1D(4), paddle.nn.Dropout(0.3)
    )


class WarmingUp(paddle.nn.Layer):
    """Counts in Python beside a buffer, as the decay of a moving average does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.num_calls = paddle.nn.Linear(4, 4), 0
        self.register_buffer("mean", paddle.zeros([4]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.num_calls += 1
        decay = min(0.9, (1 + self.num_calls) / (10 + self.num_calls))
        self.mean = decay * self.mean + (1 - decay) * x.detach().mean(0)
        return (self.linear(x) * self.num_calls + self.mean).tanh()


class Encoder(paddle.nn.Layer):
    """Holds its parts in a list, and is called by another name than forward."""

    def __init__(self, part: paddle.nn.Layer) -> None:
        super().__init__()
        self.parts = [part]

    def encode(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.parts[0](x)


Function = Callable[[paddle.Tensor], paddle.Tensor]
Put = Callable[[paddle.nn.Layer], None]


class Registry:
    """Layers in an attribute of the class."""

    layers: ClassVar[dict[str, paddle.nn.Layer]] = {}


CURRENT: contextvars.ContextVar[paddle.nn.Layer] = contextvars.ContextVar("CURRENT")


def wired(
    wiring: str, make: Callable[[], paddle.nn.Layer] = network
) -> tuple[paddle.nn.Layer, Function, Put]:
    """A Layer, a function that calls it, and what puts another Layer in its place."""
    layer = Registry.layers["a"] = make()
    CURRENT.set(layer)
    getter = functools.lru_cache(lambda: layer)
    module, encoder = types.ModuleType("a_module_of_a_user"), Encoder(layer)
    held, weak = collections.deque([layer]), weakref.ref(layer)
    sys.modules["a_module_of_a_user"] = module
    module.layer = layer

    def imported(x: paddle.Tensor) -> paddle.Tensor:
        from a_module_of_a_user import layer

        return layer(x)

    def put(layer: paddle.nn.Layer) -> None:
        module.layer = encoder.parts[0] = held[0] = layer

    functions: dict[str, Function] = {
        "method": encoder.encode,
        "imported": imported,
        "deque": lambda x: held[0](x),
        "weak": lambda x: (weak() or held[0])(x),
        "weak alone": lambda x: weak()(x),  # type: ignore[misc]
        "registry": lambda x: Registry.layers["a"](x),
        "context": lambda x: CURRENT.get()(x),
        "cached getter": lambda x: getter()(x),
    }
    return layer, functions[wiring], put


WIRINGS = ["method", "imported", "deque", "weak"]
CALLED = ["imported", "weak alone", "registry", "context", "cached getter"]
"""Those in which the search does not find the Layer."""


@pytest.mark.parametrize("goes_to_eval", [False, True])
@pytest.mark.parametrize("wiring", WIRINGS)
def test_buffers_move_once_and_masks_and_flags_are_those_of_the_first_forward(
    wiring: str, goes_to_eval: bool
) -> None:
    def outcome(run: Run) -> list[Any]:
        layer, function, _ = wired(wiring)
        x = leaf(6, 4)
        y = run(function, x * 2).square().sum()
        if goes_to_eval:
            layer.eval()
        y.backward()
        assert all(one.training != goes_to_eval for one in layer.sublayers(include_self=True))
        return [x, layer]

    assert_as_plain(outcome)


class Counting(paddle.nn.Layer):
    """A moving mean with a warm-up, counted in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.register_buffer("mean", paddle.zeros([4]))
        self.calls = 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = self.linear(x)
        self.calls += 1
        self.mean = self.mean + (y.detach().mean(0) - self.mean) / self.calls
        return (y - self.mean).tanh()


CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("current")


class OfClass:
    """Its entries are in its metaclass's storage, by name, as plugins are."""

    entries: ClassVar[dict[str, paddle.nn.Layer]] = {}


def found_in(where: str, layer: paddle.nn.Layer) -> Function:
    """A function that finds `layer` when it is called."""
    weak, module = weakref.ref(layer), types.ModuleType("a_module_of_a_user")
    sys.modules["a_module_of_a_user"], module.layer = module, layer
    CURRENT.set(layer)
    OfClass.entries["layer"] = layer

    @functools.lru_cache
    def getter() -> Any:
        return weak()

    def imported(x: paddle.Tensor) -> paddle.Tensor:
        from a_module_of_a_user import layer

        return layer(x)

    functions: dict[str, Function] = {
        "in a registry": lambda x: OfClass.entries["layer"](x),
        "behind a weak reference": lambda x: weak()(x),  # type: ignore[misc]
        "imported in the function": imported,
        "in a context variable": lambda x: CURRENT.get()(x),
        "given by a cached getter": lambda x: getter()(x),
    }
    return functions[where]


@case(
    "a Layer {where} that counts in Python beside its buffer",
    where=[
        "in a registry", "behind a weak reference", "imported in the function",
        "in a context variable", "given by a cached getter",
    ],
)  # fmt: skip
def test_numbers_beside_buffers(run: Run, where: str) -> Seen:
    layer, x, losses = Counting(), leaf(6, 4), []
    function = found_in(where, layer)
    for _ in range(3):
        losses.append(run(function, x * 2).square().sum())
        losses[-1].backward()
    return {"x": x, "layer": layer, "calls": layer.calls, "losses": losses}


@pytest.mark.parametrize("wiring", WIRINGS)
def test_an_update_before_the_backward_is_refused(wiring: str) -> None:
    layer, function, _ = wired(wiring)
    y = recompute(function, leaf(6, 4) * 2).square().sum()
    layer[0].weight.set_value(paddle.zeros([4, 4]))
    with pytest.raises(RecomputeError, match="was changed between the forward and the backward"):
        y.backward()


@pytest.mark.parametrize("wiring", CALLED)
def test_its_numbers_count_once(wiring: str) -> None:
    def outcome(run: Run) -> list[Any]:
        paddle.seed(3)
        layer, function, _ = wired(wiring, WarmingUp)
        x, losses = leaf(6, 4), []
        for _ in range(3):
            losses.append(run(function, x * 2).square().sum())
            losses[-1].backward()
        return [x, losses, layer, layer.num_calls]

    assert_as_plain(outcome)


@pytest.mark.parametrize("wiring", CALLED)
def test_its_attributes_are_those_of_the_first_forward(wiring: str) -> None:
    def outcome(run: Run) -> list[Any]:
        layer, function, _ = wired(wiring)
        x = leaf(6, 4)
        y = run(function, x * 2).square().sum()
        layer[2].p = 0.9
        y.backward()
        return [x, layer, layer[2].p]

    assert_as_plain(outcome)


@pytest.mark.parametrize("wiring", ["deque", "method"])
def test_the_layer_of_the_first_forward_is_there_again(wiring: str) -> None:
    def outcome(run: Run) -> list[Any]:
        first, function, put = wired(wiring)
        x, other = leaf(6, 4), network()
        y = run(function, x * 2).square().sum()
        put(other)
        y.backward()
        assert other[0].weight.grad is None
        return [x, first]

    assert_as_plain(outcome)


def test_another_layer_in_its_place_is_refused() -> None:
    _first, function, put = wired("imported")
    y = recompute(function, leaf(6, 4) * 2).square().sum()
    put(network())
    with pytest.raises(RecomputeError, match=r"calls the Layer '.*', which the first one did not"):
        y.backward()


def test_a_layer_that_the_function_makes_itself_is_no_stranger() -> None:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.Sequential(paddle.nn.Tanh(), paddle.nn.Softmax())(x)

    def outcome(run: Run) -> list[Any]:
        x = leaf(6, 4)
        run(function, x).square().sum().backward()
        return [x]

    assert_as_plain(outcome)
