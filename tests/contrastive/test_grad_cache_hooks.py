"""Hooks on parameters see the sum of all chunks, once, as in a plain step."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import ContrastiveLoss, GradCache, GradientSync
from paddle_recompute._paddle import gradients as leaf_hooks
from paddle_recompute._paddle.gradients import leaves_with_hooks
from paddle_recompute.errors import ConfigError, RecomputeError
from paddle_recompute.recompute import is_recomputing
from tests.contrastive.encoders import (
    criterion,
    gradients,
    make,
    one_shot,
    parameters,
    relative_difference,
    same_bits,
    texts,
)
from tests.contrastive.test_grad_cache_sync import SMALL, Criterion
from tests.ranks import run_ranks

SIZE = 7


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
    encoders, query, positive = make(towers), texts(1), texts(2)
    hooks = [Counting() for _ in parameters(encoders)]
    for parameter, hook in zip(parameters(encoders), hooks, strict=True):
        parameter.register_hook(hook)
    paddle.seed(3)
    one_shot(encoders, criterion, query, positive, chunk_size=size)
    expected, calls = gradients(encoders), [hook.calls for hook in hooks]
    paddle.seed(3)
    GradCache(encoders, criterion, chunk_size=size).backward(query, positive)
    assert same_bits(gradients(encoders), expected)
    assert set(calls) <= {0, 1} and [hook.calls for hook in hooks] == [2 * n for n in calls]


def test_once_per_call_when_calls_accumulate() -> None:
    encoder, query, positive = make(1), texts(1), texts(2)
    hook = Counting()
    encoder.words.weight.register_hook(hook)
    found = []
    for cached in (False, True):
        paddle.seed(3)
        for _ in range(2):
            if cached:
                GradCache(encoder, criterion, chunk_size=SIZE).backward(query, positive)
            else:
                one_shot(encoder, criterion, query, positive, chunk_size=SIZE)
        found.append(gradients(encoder))
    assert relative_difference(found[1], found[0]) < 1e-6  # .grad held something before
    assert hook.calls == 4


def test_a_hook_of_the_losss_own_parameter_and_one_that_is_shared() -> None:
    encoder, query, positive = make(1), texts(1), texts(2)
    loss = ContrastiveLoss(0.5, learnable_temperature=True)
    hook = Counting()
    loss.logit_scale.register_hook(hook)

    def scaled(ids: paddle.Tensor) -> paddle.Tensor:
        return encoder(ids) * loss.logit_scale

    found = []
    for function in (encoder, scaled):
        for cached in (False, True):
            paddle.seed(3)
            if cached:
                GradCache(function, loss, chunk_size=SIZE).backward(query, positive)
            else:
                one_shot(function, loss, query, positive, chunk_size=SIZE)
            found.append(gradients(encoder, loss))
    assert same_bits(found[1], found[0])
    assert relative_difference(found[3], found[2]) < 1e-6  # used in every chunk and in the loss
    assert hook.calls == 4


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


def test_hooks_inside_a_chunk_run_per_chunk() -> None:
    encoder, calls = make(1), []

    def hooked(ids: paddle.Tensor) -> paddle.Tensor:
        output = encoder(ids)
        if not output.stop_gradient:
            output.register_hook(lambda gradient: calls.append(gradient.shape[0]))
        return output

    GradCache(hooked, criterion, chunk_size=10).backward(texts(1), texts(2))
    assert sorted(calls) == [4, 4, 10, 10, 10, 10]


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


def train_with_hooks(mode: Any) -> dict[str, Any]:
    encoder, loss = make(1, dropout=0.0), Criterion("local")
    for parameter in (encoder.words.weight, loss.factor):
        parameter.register_hook(square)
    sync = GradientSync(parameters(encoder, loss), mode=mode, **SMALL)
    cache = GradCache(encoder, loss, chunk_size=SIZE, sync=sync)
    rank = paddle.distributed.get_rank()
    found, early = [], []
    for step in range(3):
        cache.backward(texts(4 * step + rank), texts(4 * step + 2 + rank))
        early.append(sync.num_early_buckets)
        found.append(gradients(encoder, loss))
    return {"gradients": found, "early": early}


@pytest.mark.parametrize("mode", ["overlap", "fused"])
def test_hooks_run_before_the_gradients_are_sent(mode: str) -> None:
    first, second = run_ranks(train_with_hooks, num_ranks=2, mode=mode)
    encoder, loss = make(1, dropout=0.0), Criterion("local")
    hooked = [encoder.words.weight, loss.factor]
    for parameter in hooked:
        parameter.register_hook(square)
    for step in range(3):
        of_ranks = []
        for rank in range(2):
            one_shot(
                encoder, loss, texts(4 * step + rank), texts(4 * step + 2 + rank), chunk_size=SIZE
            )
            of_ranks.append(gradients(encoder, loss))
        expected = [(one + other) / 2 for one, other in zip(*of_ranks, strict=True)]
        assert same_bits(first["gradients"][step], second["gradients"][step])
        assert relative_difference(first["gradients"][step], expected) < 1e-6
    if mode == "overlap":
        assert min(first["early"][1:]) > 0, "the others are still sent early"


def test_hooks_on_the_embeddings_change_their_gradient() -> None:
    query, positive = paddle.randn([6, 4]), paddle.randn([6, 4])

    def loss(q: paddle.Tensor, p: paddle.Tensor) -> paddle.Tensor:
        q.register_hook(lambda gradient: gradient * 2)
        p.register_hook(lambda gradient: gradient * 3)
        return (q * p * p).sum()

    found = []
    for cached in (False, True):
        paddle.seed(1)
        encoder = paddle.nn.Linear(4, 4)
        if cached:
            GradCache(encoder, loss, chunk_size=3).backward(query, positive)
        else:
            sides = [paddle.concat([encoder(x[:3]), encoder(x[3:])]) for x in (query, positive)]
            loss(*sides).backward()
        found.append(encoder.weight.grad.numpy())
    np.testing.assert_array_equal(*found)
