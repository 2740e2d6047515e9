"""The forms for CPUs make the bits of Paddle's own Layers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.base import core

from paddle_recompute._paddle import cpu_forms
from paddle_recompute._paddle.amp import AmpState, amp_state_of
from tests.fake_device import selected

pytestmark = pytest.mark.skipif(selected.is_selected(), reason="the forms are for CPUs")


def same(one: paddle.Tensor, other: paddle.Tensor) -> bool:
    return one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_a_million_elements_of_dropout(p: float) -> None:
    assert cpu_forms._limit(p) is not None
    found = []
    dy = paddle.randn([1000, 1000])
    given = paddle.randn([1000, 1000])
    for function in (F.dropout, cpu_forms.dropout):
        paddle.seed(3)
        x = given.clone().detach()
        x.stop_gradient = False
        y = function(x, p)
        y.backward(dy)
        found.append((y, x.grad, paddle.rand([2])))  # as many numbers of the generator
    assert all(same(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("p", [0.0, 0, 1.0, 1, 0.001])
def test_a_share_that_30_bits_do_not_tell_is_left_to_paddle(p: float) -> None:
    assert cpu_forms._limit(p) is None
    paddle.seed(0)
    ours = cpu_forms.dropout(paddle.ones([100, 100]), p)
    paddle.seed(0)
    assert same(ours, F.dropout(paddle.ones([100, 100]), p))


def test_dropout_has_a_second_derivative() -> None:
    x = paddle.randn([8, 8])
    x.stop_gradient = False
    y = cpu_forms.dropout(x, 0.5)  # y is x times 2 or 0
    (gradient,) = paddle.grad(y.square().sum(), [x], create_graph=True)
    (second,) = paddle.grad(gradient.square().sum(), [x])
    np.testing.assert_array_equal(second.numpy(), (y * 64).numpy())


@pytest.mark.parametrize("keys", [None, 5])
@pytest.mark.parametrize("masked", [True, False])
def test_attention(keys: int | None, masked: bool) -> None:
    paddle.seed(0)
    own = paddle.nn.MultiHeadAttention(32, 4, dropout=0.1)
    ours = copy.deepcopy(own)
    cpu_forms.use_cpu_forms(ours)
    assert type(ours) is cpu_forms.MultiHeadAttention
    mask = paddle.randn([3, 1, 1, keys or 7]) if masked else None
    given = [paddle.randn([3, 7, 32]), *([paddle.randn([3, keys, 32])] * 2 if keys else [])]
    found = []
    for layer in (own, ours):
        paddle.seed(1)
        inputs = [one.clone().detach() for one in given]
        for one in inputs:
            one.stop_gradient = False
        y = layer(*inputs, attn_mask=mask)
        y.square().sum().backward()
        found.append([y, *(one.grad for one in (*inputs, *layer.parameters())), paddle.rand([2])])
    assert all(same(one, other) for one, other in zip(*found, strict=True))


class Called(Exception):
    """Paddle's own form was called."""


def called(*_: Any, **__: Any) -> None:
    raise Called


def test_in_mixed_precision_and_in_float64_paddles_own_form_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_forms._Dropout, "apply", called)
    with pytest.raises(Called):
        cpu_forms.dropout(paddle.ones([2]), 0.5)
    cpu_forms.dropout(paddle.ones([2], "float64"), 0.5)
    lists: Any = (set(), set())
    for level in (core.AmpLevel.O1, core.AmpLevel.O2):
        with amp_state_of(AmpState(level, "float16", lists, False)):
            cpu_forms.dropout(paddle.ones([2]), 0.5)
