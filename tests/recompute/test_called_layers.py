"""Layers that no search from the function finds: met when they are called."""

from __future__ import annotations

import collections
import queue
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
from tests.recompute.contract import leaf


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


class Setting:
    """Somebody's place for a Layer; `put` puts another one there."""

    def __init__(self, wiring: str) -> None:
        self.layer = network()
        self._module = types.ModuleType("a_module_of_a_user")
        self._encoder = Encoder(self.layer)
        self._deque = collections.deque([self.layer])
        self._queue: queue.Queue[Any] = queue.Queue()
        self.put(self.layer)
        self.function: Callable[[paddle.Tensor], paddle.Tensor] = getattr(self, wiring)()

    def put(self, layer: paddle.nn.Layer) -> None:
        self._module.layer = layer
        self._encoder.parts[0] = layer
        self._deque[0] = layer
        with self._queue.mutex:
            self._queue.queue.clear()
        self._queue.put(layer)
        self.layer = layer

    def method(self) -> Any:
        return self._encoder.encode

    def imported(self) -> Any:
        sys.modules["a_module_of_a_user"] = self._module

        def function(x: paddle.Tensor) -> paddle.Tensor:
            from a_module_of_a_user import layer

            return layer(x)

        return function

    def deque(self) -> Any:
        held = self._deque
        return lambda x: held[0](x)

    def queued(self) -> Any:
        held = self._queue
        return lambda x: held.queue[0](x)

    def weak(self) -> Any:
        held, here = weakref.ref(self.layer), self._deque
        return lambda x: (held() or here[0])(x)


WIRINGS = ["method", "imported", "deque", "queued", "weak"]


@pytest.mark.parametrize("wiring", WIRINGS)
def test_buffers_move_once_and_masks_are_those_of_the_first_forward(wiring: str) -> None:
    found = []
    for run in (lambda f, x: f(x), recompute):
        setting = Setting(wiring)
        x = leaf(6, 4)
        paddle.seed(7)
        run(setting.function, x * 2).square().sum().backward()
        layer = setting.layer
        found.append([x.grad, layer[0].weight.grad, layer[1]._mean, layer[1]._variance])
    for plain, ours in zip(*found, strict=True):
        np.testing.assert_array_equal(plain.numpy(), ours.numpy())


@pytest.mark.parametrize("wiring", WIRINGS)
def test_flags_are_those_of_the_first_forward(wiring: str) -> None:
    found = []
    for run in (lambda f, x: f(x), recompute):
        setting = Setting(wiring)
        x = leaf(6, 4)
        paddle.seed(7)
        y = run(setting.function, x * 2).square().sum()
        setting.layer.eval()
        y.backward()
        assert not any(one.training for one in setting.layer.sublayers(include_self=True))
        found.append([x.grad, setting.layer[0].weight.grad])
    for plain, ours in zip(*found, strict=True):
        np.testing.assert_array_equal(plain.numpy(), ours.numpy())


@pytest.mark.parametrize("wiring", WIRINGS)
def test_an_update_before_the_backward_is_refused(wiring: str) -> None:
    setting = Setting(wiring)
    y = recompute(setting.function, leaf(6, 4) * 2).square().sum()
    setting.layer[0].weight.set_value(paddle.zeros([4, 4]))
    with pytest.raises(RecomputeError, match="was changed between the forward and the backward"):
        y.backward()


def test_a_deque_holds_the_layer_of_the_first_forward_again() -> None:
    found = []
    for run in (lambda f, x: f(x), recompute):
        setting = Setting("deque")
        first, x = setting.layer, leaf(6, 4)
        paddle.seed(7)
        y = run(setting.function, x * 2).square().sum()
        setting.put(network())
        y.backward()
        assert setting.layer[0].weight.grad is None
        found.append([x.grad, first[0].weight.grad])
    for plain, ours in zip(*found, strict=True):
        np.testing.assert_array_equal(plain.numpy(), ours.numpy())


NOT_REFUSED = ("weak", "method", "deque")


@pytest.mark.parametrize("wiring", [one for one in WIRINGS if one not in NOT_REFUSED])
def test_another_layer_in_its_place_is_refused(wiring: str) -> None:
    setting = Setting(wiring)
    y = recompute(setting.function, leaf(6, 4) * 2).square().sum()
    setting.put(network())
    with pytest.raises(RecomputeError, match=r"calls the Layer '.*', which the first one did not"):
        y.backward()


def test_a_layer_that_a_method_reads_is_put_back() -> None:
    gradients = []
    for run in (lambda f, x: f(x), recompute):
        setting, x = Setting("method"), leaf(6, 4)
        paddle.seed(7)
        y = run(setting.function, x * 2).square().sum()
        setting.put(network())
        y.backward()
        gradients.append(x.grad.numpy())
    np.testing.assert_array_equal(*gradients)


def test_a_layer_that_the_function_makes_itself_is_no_stranger() -> None:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.Sequential(paddle.nn.Tanh(), paddle.nn.Softmax())(x)

    x = leaf(6, 4)
    recompute(function, x).square().sum().backward()
    ours = x.grad.numpy()
    x.clear_gradient()
    function(x).square().sum().backward()
    np.testing.assert_array_equal(ours, x.grad.numpy())


def test_a_gradient_cache_over_methods_moves_buffers_once() -> None:
    query, positive = leaf(6, 4).detach(), leaf(6, 4).detach() + 1
    moved = []
    for cached in (False, True):
        encoder = Encoder(network())
        encoder.parts[0][2].p = 0.0

        def loss(q: paddle.Tensor, p: paddle.Tensor) -> paddle.Tensor:
            return (q * p).sum()

        if cached:
            GradCache(encoder.encode, loss, chunk_size=3).backward(query, positive)
        else:
            parts = [encoder.encode(x[i : i + 3]) for x in (query, positive) for i in (0, 3)]
            loss(paddle.concat(parts[:2]), paddle.concat(parts[2:])).backward()
        norm = encoder.parts[0][1]
        moved.append([norm._mean.numpy(), norm._variance.numpy()])
    for plain, ours in zip(*moved, strict=True):
        np.testing.assert_array_equal(plain, ours)
