"""Without chunks nothing is encoded twice, and the encoders' backwards do not interleave."""

from __future__ import annotations

from typing import Any, ClassVar

import paddle
import pytest

from paddle_recompute import ContrastiveLoss, GradCache
from tests.contrastive.encoders import (
    BATCH,
    criterion,
    gradients,
    make,
    one_shot,
    same_bits,
    texts,
)

SIZES = [pytest.param(1, id="tied"), pytest.param(2, id="separate")]


@pytest.mark.parametrize("towers", SIZES)
def test_the_gradients_are_those_of_a_plain_step(towers: int) -> None:
    encoders, query, positive = make(towers), texts(1), texts(2)
    paddle.seed(3)
    expected_loss = one_shot(encoders, criterion, query, positive, chunk_size=BATCH)
    expected = gradients(encoders)
    paddle.seed(3)
    cache = GradCache(encoders, criterion)
    loss = cache.backward(query, positive)
    assert cache.num_chunks == 2
    assert float(loss) == float(expected_loss)
    assert same_bits(gradients(encoders), expected)


class Order(paddle.autograd.PyLayer):
    """The identity, which notes when its backward runs."""

    log: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, name: str) -> paddle.Tensor:
        ctx.name = name
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        Order.log.append(ctx.name)
        return gradient * 1


class Stack(paddle.nn.Layer):
    """Three linear Layers; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = paddle.nn.LayerList([paddle.nn.Linear(4, 4) for _ in range(3)])
        self.calls = 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = Order.apply(paddle.tanh(layer(x)), f"call {self.calls}")
        return x


def test_one_encoder_ends_its_backward_before_the_other_begins() -> None:
    stack, loss = Stack(), ContrastiveLoss()
    query, positive = paddle.randn([6, 4]), paddle.randn([6, 4])
    Order.log.clear()
    loss(stack(query), stack(positive)).backward()
    plain, Order.log[:] = Order.log[:], []
    assert plain[:2] in (["call 1", "call 2"], ["call 2", "call 1"]), "the engine takes turns"
    stack.calls = 0
    GradCache(stack, loss).backward(query, positive)
    assert stack.calls == 2
    assert Order.log in (["call 1"] * 3 + ["call 2"] * 3, ["call 2"] * 3 + ["call 1"] * 3)
