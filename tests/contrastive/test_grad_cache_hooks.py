"""Hooks on parameters see the sum of all chunks, once, as in a plain step."""

from __future__ import annotations

import gc

import paddle
import pytest

from paddle_recompute import GradCache
from paddle_recompute._paddle import gradients as leaf_hooks
from paddle_recompute._paddle.gradients import leaves_with_hooks
from paddle_recompute.errors import ConfigError, RecomputeError
from paddle_recompute.recompute import is_recomputing
from tests.contrastive.encoders import (
    SIZE,
    both,
    criterion,
    make,
    parameters,
    same_bits,
    texts,
)


def square(gradient: paddle.Tensor) -> paddle.Tensor:
    return gradient * gradient


class Counting:
    """A hook that is not linear, and how often it ran."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gradient: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        return gradient * gradient + 0.01


def test_a_hook_on_the_input_runs_once_per_chunk() -> None:
    linear, norms = paddle.nn.Linear(6, 5), []

    def encoder(x: paddle.Tensor) -> paddle.Tensor:
        x.stop_gradient = False
        x.register_hook(lambda gradient: norms.append(float(gradient.norm())))
        return linear(x).tanh()

    GradCache(encoder, criterion, chunk_size=2).backward(paddle.randn([8, 6]), paddle.randn([8, 6]))
    assert len(norms) == 8


@pytest.mark.parametrize("towers", [1, 2], ids=["tied", "separate"])
@pytest.mark.parametrize("size", [1, SIZE, 24])
def test_once_on_the_sum(towers: int, size: int) -> None:
    encoders = make(towers)
    hooks = [Counting() for _ in parameters(encoders)]
    for parameter, hook in zip(parameters(encoders), hooks, strict=True):
        parameter.register_hook(hook)
    assert same_bits(*both(encoders, chunk_size=size))
    # Once in each of both steps, where the parameter is used.
    assert {hook.calls for hook in hooks} <= {0, 2}


def test_hooks_can_be_removed_and_come_back_after_an_error() -> None:
    encoder, query, positive = make(1), texts(1), texts(2)
    weight = encoder.words.weight
    hook = Counting()
    handle = weight.register_hook(hook)
    (weight.sum() * 2).backward()
    before = weight.grad.numpy().copy()

    def failing(ids: paddle.Tensor) -> paddle.Tensor:
        if is_recomputing():
            raise RecomputeError("stop")
        return encoder(ids)

    with pytest.raises(RecomputeError, match="stop"):
        GradCache(failing, criterion, chunk_size=SIZE).backward(query, positive)
    assert hook.calls == 1 and (weight.grad.numpy() == before).all()
    weight.sum().backward()
    assert hook.calls == 2, "not muted any more"
    assert handle.remove()
    GradCache(encoder, criterion, chunk_size=SIZE).backward(query, positive)
    assert hook.calls == 2


def test_a_hook_from_before_the_import_is_refused() -> None:
    encoder = make(1)
    weight = encoder.words.weight
    leaf_hooks._register_grad_hook(weight, square)  # as it was registered then
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"the parameter '{weight.name}' got a hook"):
            GradCache(encoder, criterion, chunk_size=SIZE)


def test_a_leaf_that_is_gone_is_forgotten() -> None:
    gc.collect()
    before = len(leaves_with_hooks())
    tensor = paddle.zeros([2])
    tensor.stop_gradient = False
    tensor.register_hook(square)
    assert len(leaves_with_hooks()) == before + 1
    del tensor
    assert len(leaves_with_hooks()) == before


def test_hooks_on_the_embeddings_change_their_gradient() -> None:
    def loss(query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        query.register_hook(lambda gradient: gradient * 2)
        positive.register_hook(lambda gradient: gradient * 3)
        return criterion(query, positive)

    assert same_bits(*both(make(1), loss=loss))
