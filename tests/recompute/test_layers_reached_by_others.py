"""What code outside of a Layer's own forward does with it: reads its attributes, calls its other
methods, seeds a stream, exchanges its members. `recompute` and `GradCache` against the plain call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import Tensor

from paddle_recompute import GradCache, recompute
from tests.recompute.contract import leaf

F = paddle.nn.functional
Call = Callable[..., Any]


class Child(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def project(self, x: Tensor) -> Tensor:
        return F.tanh(self.linear(x) * self.scale)

    def noisy(self, x: Tensor) -> Tensor:
        return F.tanh(self.linear(x) * (random.random() + float(np.random.rand())))

    @property
    def noise(self) -> float:
        return random.random()


class Parent(paddle.nn.Layer):
    def __init__(self, act: Callable[[Child, Tensor], Tensor]) -> None:
        super().__init__()
        self.child = Child()
        self._act = act

    def forward(self, x: Tensor) -> Tensor:
        return self._act(self.child, x)


class Named(Parent):
    def forward(self, x: Tensor) -> Tensor:
        return self.child.noisy(x)


def free(layer: Child, x: Tensor) -> Tensor:
    return layer.noisy(x)


READERS: dict[str, Callable[[Child, Tensor], Tensor]] = {
    "a function reads it": lambda child, x: F.tanh(child.linear(x) * child.scale),
    "another method reads it": lambda child, x: child.project(x),
}
DRAWERS: dict[str, Callable[[Child, Tensor], Tensor]] = {
    "another method draws": lambda child, x: child.noisy(x),
    "a property draws": lambda child, x: F.tanh(child.linear(x) * child.noise),
    "a function that calls a method": free,
}


def seeded(make: Callable[[], Any]) -> Any:
    random.seed(1)
    np.random.seed(1)
    paddle.seed(1)
    return make()


def same(outcome: Callable[[Call], list[Any]]) -> None:
    plain = outcome(lambda function, *inputs: function(*inputs))
    assert plain == outcome(recompute)


@pytest.mark.parametrize("name", READERS)
def test_an_attribute_changed_in_between_is_that_of_the_forward(name: str) -> None:
    def outcome(call: Call) -> list[Any]:
        model = seeded(lambda: Parent(READERS[name]))
        y = call(model, leaf(2, 4)).sum()
        model.child.scale = 9.0
        y.backward()
        return [model.child.linear.weight.grad.tolist(), model.child.scale]

    same(outcome)


@pytest.mark.parametrize(
    "make", [*(lambda act=act: Parent(act) for act in DRAWERS.values()), lambda: Named(free)]
)
def test_draws_of_other_methods_are_repeated(make: Callable[[], Parent]) -> None:
    def outcome(call: Call) -> list[Any]:
        model = seeded(make)
        call(model, leaf(2, 4)).sum().backward()
        grad = model.child.linear.weight.grad.tolist()
        return [grad, random.random(), float(np.random.rand())]

    same(outcome)


def test_a_function_that_seeds_a_stream_leaves_it_as_the_plain_call() -> None:
    def outcome(call: Call) -> list[Any]:
        linear = seeded(lambda: paddle.nn.Linear(4, 4))

        def block(x: Tensor) -> Tensor:
            paddle.seed(5)
            return F.dropout(linear(x), 0.5)

        y = call(block, call(block, leaf(2, 4)))
        paddle.rand([3])
        y.sum().backward()
        return [linear.weight.grad.tolist(), paddle.rand([2]).tolist()]

    same(outcome)


class Swap(paddle.nn.Layer):
    """Its forward exchanges a sublayer for another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4)
        self.current = self.first

    def forward(self, x: Tensor) -> Tensor:
        y = paddle.tanh(self.current(x))
        self.current = self.second if self.current is self.first else self.first
        return y


def test_a_sublayer_that_the_forward_exchanges_is_put_back() -> None:
    def outcome(call: Call) -> list[Any]:
        model = seeded(Swap)
        call(model, leaf(2, 4)).sum().backward()
        return [model.first.weight.grad.tolist(), model.second.weight.grad is None]

    same(outcome)


class LateBuffer(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.register_buffer("other", paddle.ones([1]))

    def forward(self, x: Tensor) -> Tensor:
        if "late" not in self._buffers:
            self.register_buffer("late", paddle.ones([4]) * 0.5)
        y = paddle.tanh(self.linear(x) * self.late)
        self.late = self.late + 0.25
        return y


class Noise(paddle.nn.Layer):
    def forward(self, x: Tensor) -> Tensor:
        return paddle.tanh(x * float(np.random.rand()))


class Holder(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.extra = [Noise()]

    def forward(self, x: Tensor) -> Tensor:
        return x


class LateLayer(paddle.nn.Layer):
    """It calls a Layer that nobody's forward but its own names."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()

    def forward(self, x: Tensor) -> Tensor:
        return self.holder.extra[0](self.holder.linear(x))


@pytest.mark.parametrize("make", [LateBuffer, LateLayer, Swap])
def test_chunks_of_a_gradient_cache(make: Callable[[], paddle.nn.Layer]) -> None:
    query, positive = leaf(6, 4).detach(), leaf(6, 4).detach() * 2

    def loss_fn(one: Tensor, other: Tensor) -> Tensor:
        return (one * other).sum()

    def parameters(model: paddle.nn.Layer) -> list[Any]:
        return [None if p.grad is None else p.grad.numpy() for p in model.parameters()]

    encoder = seeded(make)
    embedded = [
        paddle.concat([encoder(side[i : i + 2]) for i in (0, 2, 4)]) for side in (query, positive)
    ]
    loss_fn(*embedded).backward()
    expected = parameters(encoder)
    encoder = seeded(make)
    GradCache(encoder, loss_fn, chunk_size=2).backward(query, positive)
    for one, other in zip(parameters(encoder), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)  # sums in another order
