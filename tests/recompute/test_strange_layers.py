"""Layers that are reached or made in unusual ways compute what the plain call computes."""

from __future__ import annotations

import functools
import operator
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


@pytest.fixture
def noisy_matmul(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``paddle.matmul``, replaced by a function that draws from NumPy."""
    original = paddle.matmul
    monkeypatch.setattr(
        paddle, "matmul", lambda *args, **how: original(*args, **how) * float(np.random.rand())
    )
    yield


class Attention(nn.Layer):
    """Paddle's own, which calls ``paddle.matmul``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiHeadAttention(8, 2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.attention(x.unsqueeze(0))


@pytest.mark.usefixtures("noisy_matmul")
def test_a_function_of_paddle_that_is_replaced() -> None:
    assert_same(Attention)


class Turning(nn.Layer):
    """Its forward puts the first of its sublayers last, and calls them in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self._sub_layers.move_to_end(next(iter(self._sub_layers)))
        for layer in self._sub_layers.values():
            x = layer(x).tanh()
        return x


def test_sublayers_whose_order_the_forward_changes() -> None:
    assert_same(Turning)


class Calling(nn.Layer):
    """Has members of a class whose code cannot be read, and one that is None until it is set."""

    scaled = property(operator.attrgetter("scale"))
    cached = functools.cached_property(operator.attrgetter("scale"))
    drawn = staticmethod(np.random.rand)
    also_drawn = classmethod(functools.partial(lambda scale, _: scale * np.random.rand(), 3))
    activation: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 2.0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        h = self.linear(x) * self.scaled * self.cached * float(self.drawn() + self.also_drawn())
        return h.tanh() if self.activation is None else self.activation(h)


def test_members_of_a_class_whose_code_cannot_be_read() -> None:
    assert_same(Calling)


class Activated(nn.Layer):
    """A constant of its class is None until somebody sets it."""

    activation: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        h = self.linear(x)
        return h.tanh() if self.activation is None else self.activation(h)


def test_a_constant_of_a_class_that_becomes_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    recompute(Activated(), paddle.ones([2, 8])).sum().backward()
    noisy = lambda self, h: (h * float(np.random.rand())).tanh()  # noqa: E731
    monkeypatch.setattr(Activated, "activation", noisy)
    assert_same(Activated)


class Toggling(nn.Layer):
    """Its forward exchanges two sublayers, an attribute, and the items of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.signs = [paddle.to_tensor(1.0), paddle.to_tensor(-2.0)]
        self.scale, self.other = paddle.to_tensor(3.0), paddle.to_tensor(4.0)

    def toggle(self) -> None:
        self.first, self.second = self.second, self.first
        self.signs.reverse()
        self.scale, self.other = self.other, self.scale

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.toggle()
        return self.first(x) * self.signs[0] * self.scale

    def state(self) -> list[Any]:
        return [self.first, self.second, *self.signs, self.scale, self.other]


@pytest.mark.parametrize("times", [0, 1])
def test_what_the_second_forward_exchanges_is_put_back(times: int) -> None:
    """Also where the caller has put it back before, so that the second forward changes nothing
    that it would have to restore first.
    """
    model = Toggling()
    y = recompute(model, paddle.ones([2, 8]))
    for _ in range(times):
        model.toggle()
    before = model.state()
    y.sum().backward()
    assert all(map(operator.is_, model.state(), before))
