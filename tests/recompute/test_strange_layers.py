"""Layers that are reached or made in unusual ways compute what the plain call computes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn import functional

from paddle_recompute import recompute

nn = paddle.nn


def gradients(
    make: Callable[[], Any], call: Callable[[Any, paddle.Tensor], paddle.Tensor], steps: int = 3
) -> list[Any]:
    """Of the input and of all parameters, over some steps, and the last number of NumPy."""
    paddle.seed(7)
    np.random.seed(7)
    model, found = make(), []
    x = paddle.randn([6, 8])
    x.stop_gradient = False
    for _ in range(steps):
        call(model, x).square().sum().backward()
        found += [one.grad.numpy() for one in [x, *model.parameters()] if one.grad is not None]
    return [*found, np.random.rand()]


def assert_same(make: Callable[[], Any]) -> None:
    plain = gradients(make, lambda model, x: model(x))
    for one, other in zip(plain, gradients(make, recompute), strict=True):
        np.testing.assert_array_equal(one, other)


class Holder(nn.Layer):
    """Reaches a Layer that it does not own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.others = [weakref.proxy(self.linear)]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return functional.tanh(self.others[0](x))


def test_a_weak_proxy_of_a_layer() -> None:
    assert_same(Holder)


class CountingNorm(nn.BatchNorm1D):
    """Has a buffer of its own, which its forward reads and changes."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("calls", paddle.ones([1]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        normed = super().forward(x) * self.calls
        self.calls = self.calls + 1
        return normed


def test_a_buffer_of_a_subclass_of_batch_norm() -> None:
    assert_same(lambda: nn.Sequential(nn.Linear(8, 8), CountingNorm(8), nn.Linear(8, 8)))


@pytest.fixture
def noisy_linear(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``functional.linear``, wrapped in a function that draws from NumPy."""
    original = functional.linear

    @functools.wraps(original)
    def noisy(*args: Any, **kwargs: Any) -> paddle.Tensor:
        return functional.tanh(original(*args, **kwargs) * float(np.random.rand()))

    monkeypatch.setattr(functional, "linear", noisy)
    yield


@pytest.mark.usefixtures("noisy_linear")
def test_a_function_of_paddle_that_is_wrapped() -> None:
    assert_same(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))


class Patched(nn.Layer):
    """Calls the function that happens to be in ``functional``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        h = self.linear(x)
        if hasattr(functional, "first_of_ours"):
            return functional.first_of_ours(h)
        return functional.second_of_ours(h)


def test_functions_that_are_exchanged_in_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "first_of_ours", lambda h: h.tanh(), raising=False)
    x = paddle.ones([2, 8])
    x.stop_gradient = False
    model = Patched()
    recompute(model, x).sum().backward()
    monkeypatch.delattr(functional, "first_of_ours")
    second: Callable[[paddle.Tensor], paddle.Tensor] = lambda h: (  # noqa: E731
        h * float(np.random.rand())
    ).tanh()
    monkeypatch.setattr(functional, "second_of_ours", second, raising=False)
    found = []
    for call in (model, functools.partial(recompute, model)):
        x.clear_gradient(False)
        np.random.seed(3)
        call(x).sum().backward()
        found.append((x.grad.numpy(), np.random.rand()))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
