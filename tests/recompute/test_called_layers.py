"""Layers that no search from the function finds: met when they are called."""

from __future__ import annotations

import collections
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.contrastive import GradCache
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import recompute
from tests.recompute.contract import Run, assert_as_plain, leaf


def network() -> paddle.nn.Layer:
    paddle.seed(3)
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


Function = Callable[[paddle.Tensor], paddle.Tensor]
Put = Callable[[paddle.nn.Layer], None]


def wired(wiring: str) -> tuple[paddle.nn.Layer, Function, Put]:
    """A Layer, a function that calls it, and what puts another Layer in its place."""
    layer = network()
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
    }
    return layer, functions[wiring], put


WIRINGS = ["method", "imported", "deque", "weak"]


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


@pytest.mark.parametrize("wiring", WIRINGS)
def test_an_update_before_the_backward_is_refused(wiring: str) -> None:
    layer, function, _ = wired(wiring)
    y = recompute(function, leaf(6, 4) * 2).square().sum()
    layer[0].weight.set_value(paddle.zeros([4, 4]))
    with pytest.raises(RecomputeError, match="was changed between the forward and the backward"):
        y.backward()


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


class Swap(paddle.nn.Layer):
    """Its forward exchanges a sublayer for another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4)
        self.current = self.first

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = paddle.tanh(self.current(x))
        self.current = self.second if self.current is self.first else self.first
        return y


class LateLayer(paddle.nn.Layer):
    """Calls a Layer that is in a list of another one; it draws from NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = Encoder(paddle.nn.Dropout(0.0))
        self.holder.linear = paddle.nn.Linear(4, 4)
        self.holder.parts[0].register_forward_post_hook(
            lambda layer, inputs, y: paddle.tanh(y * float(np.random.rand()))
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.holder.parts[0](self.holder.linear(x))


@pytest.mark.parametrize("make", [LateLayer, Swap])
def test_chunks_of_a_gradient_cache(make: Callable[[], paddle.nn.Layer]) -> None:
    query, positive = leaf(6, 4).detach(), leaf(6, 4).detach() * 2

    def loss_fn(one: paddle.Tensor, other: paddle.Tensor) -> paddle.Tensor:
        return (one * other).sum()

    found = []
    for cached in (False, True):
        paddle.seed(1), np.random.seed(1)
        model = make()
        if cached:
            GradCache(model, loss_fn, chunk_size=2).backward(query, positive)
        else:
            rows = [[model(side[i : i + 2]) for i in (0, 2, 4)] for side in (query, positive)]
            loss_fn(*map(paddle.concat, rows)).backward()
        found.append([p.grad.numpy() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)  # sums in another order
