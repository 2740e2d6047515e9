"""Variables that share memory: what was detached keeps its numbers, with recompute and without.

Paddle's own executor writes over them (``exp(h) * h.detach()`` is the square of the exponential in
3.3, ``h.detach() * 2`` doubles `h` in 2.6), so the reference is Paddle that writes over nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import load_config
from paddle_recompute.recompute import recompute_wrapper
from paddle_recompute.static_graph import StaticTrainStep, mark_checkpoint
from tests.static_graph.models import (
    BATCH,
    HIDDEN,
    Run,
    assert_equal,
    data,
    executor_in_place,
    needs_pir,
    num_recomputed,
    train,
)


def tanh_and_detached(h: Any) -> Any:
    return paddle.tanh(h) + h.detach() * 2


def used_before(h: Any) -> Any:
    fixed = h.detach()
    return fixed * 0.5 + paddle.exp(-paddle.abs(h))


def exponential(h: Any) -> Any:
    fixed = h.detach()
    return paddle.exp(-paddle.abs(h)) * fixed


def detached_twice(h: Any) -> Any:
    fixed = h.detach()
    return paddle.nn.functional.gelu(h) * fixed + paddle.tanh(fixed.detach()) * 3


def chain(h: Any) -> Any:
    return paddle.tanh(h.detach().detach() * 3) + paddle.nn.functional.sigmoid(h)


def doubled(h: Any) -> Any:
    return h.detach() * 2 + h * h


def target(h: Any) -> Any:
    fixed = (h.detach() * 3).detach()
    return (h - fixed) * (h - paddle.tanh(fixed))


FORMS = [tanh_and_detached, used_before, exponential, detached_twice, chain, doubled, target]
Form = Callable[[Any], Any]


def loss_of(form: Form, *, wraps: bool = False) -> Any:
    """As in a model: two blocks, each a checkpoint, and something after them."""

    class Part(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = paddle.nn.Linear(HIDDEN, HIDDEN)
            self.outer = paddle.nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Any) -> Any:
            y = form(self.inner(x))
            return self.outer(y * y)

    x = data()
    for index in range(2):
        part = recompute_wrapper(Part()) if wraps else Part()
        x = paddle.tanh(part(x))
        if not wraps:
            mark_checkpoint(x, f"c{index}")
    return (paddle.tanh(x) * x).mean()


def sgd() -> Any:
    return paddle.optimizer.SGD(0.5)


@functools.cache
def right_of(form: Form) -> Run:
    """Without recompute, and without the in-place pass; with the pass it is the same."""
    with executor_in_place(False):
        right = train(lambda: loss_of(form), None, make_optimizer=sgd)
    assert len(set(right.losses)) == 3
    assert_equal(train(lambda: loss_of(form), None, make_optimizer=sgd), right)
    return right


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("wraps", [False, True], ids=["marked", "wrapped"])
def test_what_was_detached_keeps_its_numbers(form: Form, wraps: bool) -> None:
    right = right_of(form)
    run = train(lambda: loss_of(form, wraps=wraps), (), make_optimizer=sgd)
    assert num_recomputed(run) > 0
    assert_equal(run, right)


def test_a_detached_parameter_is_not_changed() -> None:
    def build() -> Any:
        layer = paddle.nn.Linear(HIDDEN, HIDDEN)
        x = mark_checkpoint(paddle.tanh(layer(data())), "c")
        return (x * (layer.bias.detach() + 1) * paddle.exp(layer.weight.detach()).sum()).mean()

    with executor_in_place(False):
        right = train(build, None)
    assert_equal(train(build, None), right)
    assert_equal(train(build, ()), right)


class Encoder(paddle.nn.Layer):
    """With a block that the configuration names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = paddle.nn.Linear(HIDDEN, HIDDEN)
        self.block = paddle.nn.Sequential(paddle.nn.Linear(HIDDEN, HIDDEN), Mixed())
        self.last = paddle.nn.Linear(HIDDEN, 1)

    def forward(self, x: Any) -> Any:
        return self.last(self.block(self.first(x)))


class Mixed(paddle.nn.Layer):
    def forward(self, h: Any) -> Any:
        return tanh_and_detached(h) * exponential(h)


def losses_of_a_step(*, recompute: bool) -> list[float]:
    config = load_config(
        "fleet_configs/contrastive_ernie-tiny_2cpu.yaml",
        [f"recompute.enable={str(recompute).lower()}", "recompute.checkpoints=['block']"],
    )
    paddle.seed(3)
    step = StaticTrainStep(config, Encoder, lambda model, x: model(x).square().mean())
    random = np.random.RandomState(0)
    return [step([random.randn(BATCH, HIDDEN).astype("float32")]).loss for _ in range(4)]


def test_a_train_step() -> None:
    with executor_in_place(False):
        right = losses_of_a_step(recompute=False)
    assert losses_of_a_step(recompute=False) == right
    assert losses_of_a_step(recompute=True) == right


@needs_pir
def test_to_static() -> None:
    """Against dygraph, to the bit: the operators are the same ones."""

    def losses(*, wraps: bool, to_static: bool) -> list[float]:
        paddle.seed(3)
        model = Encoder()
        if wraps:
            model.block = recompute_wrapper(model.block)
        call = paddle.jit.to_static(model) if to_static else model
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        random = np.random.RandomState(0)
        found = []
        for _ in range(3):
            loss = call(paddle.to_tensor(random.randn(BATCH, HIDDEN).astype("float32"))).square()
            loss.mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            found.append(float(loss.mean()))
        return found

    right = losses(wraps=False, to_static=False)
    assert losses(wraps=True, to_static=True) == right
