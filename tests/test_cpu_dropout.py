"""Dropout for CPUs: bit for bit what Paddle's own gives, or Paddle's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_recompute import RecomputeConfig, apply_recompute
from paddle_recompute._paddle import cpu_dropout
from paddle_recompute._paddle.amp import OFF, amp_state_of
from paddle_recompute._paddle.cpu_dropout import dropout, use_fast_dropout
from tests.bits import assert_same_bits
from tests.fake_device import selected

pytestmark = [
    pytest.mark.skipif(selected.is_selected(), reason="it is for CPUs"),
    pytest.mark.skipif(paddle.__version__.startswith("2.6"), reason="2.6 keeps its own dropout"),
]
RATES = [0.1, 0.5, 0.02, 0.75, 1 - 2**-24]


@pytest.fixture(autouse=True)
def _every_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_dropout, "SMALLEST", 1)
    with paddle.utils.unique_name.guard():
        yield


def bytes_of(tensor: paddle.Tensor) -> np.ndarray:
    """So that zeros of both signs differ."""
    return np.asarray(tensor.numpy().view(np.int32))


def dropped(drop: Callable[..., paddle.Tensor], p: float, shape: list[int]) -> list[np.ndarray]:
    """The bytes of output and gradient, and what the generator draws next."""
    paddle.seed(5)
    x, dy = paddle.randn(shape), paddle.randn(shape)
    x.stop_gradient = False
    y = drop(x, p)
    following = paddle.randint(0, 2**30, [2], dtype="int32")
    (dx,) = paddle.grad(y, x, dy)
    return [bytes_of(y), bytes_of(dx), following.numpy()]


@pytest.mark.parametrize("shape", [[7], [3, 5, 1], [2, 4, 33, 65]])
@pytest.mark.parametrize("p", RATES)
def test_dropout_and_the_generator_have_paddles_bits(p: float, shape: list[int]) -> None:
    assert cpu_dropout._kept_draws(p) != (0, 0)
    assert_same_bits(dropped(dropout, p, shape), dropped(F.dropout, p, shape))


@pytest.mark.parametrize(
    "millions", [4, pytest.param(100, marks=pytest.mark.matrix)], ids=lambda one: f"{one}M"
)
def test_many_masks_are_paddles(millions: int) -> None:
    """At a rate at which a limit that is half a unit off keeps another element in 2**25."""
    x = paddle.ones([10**6])
    states = []
    for drop in (F.dropout, dropout):
        paddle.seed(11)
        found = []
        for _ in range(millions):
            found.append(np.packbits(drop(x, 0.75).numpy() != 0).tobytes())
        states.append((found, paddle.randint(0, 2**30, [2]).numpy().tolist()))
    assert states[0] == states[1]


@pytest.mark.parametrize("p", [*RATES, 0.1 + 2**-27, 1 / 3, 0.0625, 0.9])
def test_the_smallest_draw_that_keeps(p: float) -> None:
    """On both sides of it; float32 rounds an integer of 64 bits as the kernel does."""
    bits, smallest = cpu_dropout._kept_draws(p)
    middle = smallest << (64 - bits)
    around = [middle + d for d in (-(2**40), -(2**33), -1, 1, 2**33, 2**40)]
    kept = [np.float32(np.uint64(u)) / np.float32(2**64) >= np.float32(p) for u in around]
    assert kept == [u >= middle for u in around] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("p", [0, 1, 0.0, 1.0, 0.01, 1 / 64])
def test_other_rates_are_paddles_own_call(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = dropped(F.dropout, p, [9])
    monkeypatch.setattr(cpu_dropout, "_Masked", None)
    assert_same_bits(dropped(dropout, p, [9]), expected)


def rows(*shape: int) -> paddle.Tensor:
    x = paddle.randn(list(shape))
    x.stop_gradient = False
    return x


class Block(paddle.nn.Layer):
    """Two blocks of a Transformer."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        block = paddle.nn.TransformerEncoderLayer(16, 2, 48, dropout, activation="gelu")
        self.blocks = paddle.nn.TransformerEncoder(block, 2)

    def forward(self, x: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        """``[batch, length, 16]``."""
        return self.blocks(x, mask)


def trained(model: paddle.nn.Layer, steps: int = 3) -> list[Any]:
    """The losses, and the parameters after `steps`."""
    paddle.seed(4)
    x, mask = paddle.randn([40, 9, 16]), -1e4 * (paddle.rand([40, 1, 1, 9]) > 0.7).astype("float32")
    optimizer = paddle.optimizer.AdamW(0.05, parameters=model.parameters())
    losses = []
    for _ in range(steps):
        loss = model(x, mask).square().mean() + model(x * 2, mask).mean()
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
        optimizer.clear_grad()
    return [losses, [one.numpy() for one in model.parameters()], paddle.rand([2]).numpy()]


@pytest.mark.parametrize("recomputed", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("strides", [True, False], ids=["strides", "copies"])
def test_training_has_the_bits_of_paddles_layers(recomputed: bool, strides: bool) -> None:
    before = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": strides})
    try:
        found = []
        for with_forms in (True, False):
            paddle.seed(1)
            model = Block()
            if with_forms:
                use_fast_dropout(model)
                assert cpu_dropout.Dropout in map(type, model.sublayers())
            if recomputed:
                apply_recompute(model, RecomputeConfig(checkpoints=["blocks.layers.*"]))
            found.append(trained(model))
    finally:
        paddle.set_flags(before)
    assert_same_bits(*found)


def test_a_compiled_model_has_the_bits_of_the_eager_one() -> None:
    found = []
    for compiled in (False, True):
        paddle.seed(1)
        model = Block(dropout=0.0)
        use_fast_dropout(model)
        x, mask = paddle.randn([4, 9, 16]), paddle.zeros([4, 1, 1, 9])
        y = (paddle.jit.to_static(model) if compiled else model)(x, mask)
        y.square().sum().backward()
        found.append([y.numpy(), *(one.grad.numpy() for one in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


def test_second_derivatives_are_paddles() -> None:
    found = []
    for with_forms in (True, False):
        paddle.seed(6)
        x, linear = rows(4, 6), paddle.nn.Linear(6, 5)
        paddle.seed(7)
        if with_forms:
            y = dropout(linear(x) ** 3, 0.5)
        else:  # F.dropout has no second derivative
            y = linear(x) ** 3 * F.dropout(paddle.ones([4, 5]), 0.5)
        of = [x, linear.weight]
        first = paddle.grad(y.sum(), of, create_graph=True)
        sum((one**2).sum() for one in first).backward()
        found.append([one.numpy() for one in first] + [one.grad.numpy() for one in of])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)  # another order of products


@pytest.mark.parametrize("of", ["the input", "a weight"])
def test_the_gradient_of_one_tensor_alone(of: str) -> None:
    found = []
    for with_forms in (True, False):
        paddle.seed(1)
        model, x = Block(), rows(4, 9, 16)
        if with_forms:
            use_fast_dropout(model)
        wanted = x if of == "the input" else model.blocks.layers[0].linear1.weight
        paddle.seed(2)
        loss = model(x, paddle.zeros([4, 1, 1, 9])).square().sum()
        found.append(paddle.grad(loss, [wanted])[0].numpy())
    assert_same_bits(*found)


@pytest.mark.parametrize("why", ["AMP", "float64", "small"])
def test_elsewhere_it_is_paddles_own_call(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_dropout, "_Masked", None)
    x, state = rows(2, 4), OFF
    if why == "AMP":
        level = paddle.base.core.AmpLevel.O1
        state = OFF._replace(level=level, dtype="bfloat16", lists=(set(), set()))
    elif why == "small":
        monkeypatch.setattr(cpu_dropout, "SMALLEST", x.size + 1)
    else:
        x = x.astype("float64")
    with amp_state_of(state):
        assert dropout(x, 0.5).dtype == x.dtype


def test_dropout_of_other_kinds_is_paddles_own() -> None:
    for options in ({"axis": 0}, {"mode": "downscale_in_infer"}):
        layer = paddle.nn.Dropout(0.5, **options)
        x = rows(4, 6)
        found = []
        for _ in range(2):
            paddle.seed(1)
            found.append(bytes_of(layer(x)))
            use_fast_dropout(layer)
        assert type(layer) is cpu_dropout.Dropout
        assert_same_bits(*found)
