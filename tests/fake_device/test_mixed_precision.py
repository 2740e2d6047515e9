"""Mixed precision that really computes in float16: Paddle's own ``auto_cast`` does on a device."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from paddle_recompute import TrainStep, recompute
from paddle_recompute.options import AmpConfigs
from tests.recompute.contract import plain


def model() -> paddle.nn.Layer:
    paddle.seed(0)
    return paddle.nn.Sequential(
        paddle.nn.Linear(16, 32), paddle.nn.GELU(), paddle.nn.LayerNorm(32), paddle.nn.Linear(32, 1)
    )


def loss_of(layer: paddle.nn.Layer, rows: paddle.Tensor) -> paddle.Tensor:
    return layer(rows).astype("float32").square().mean()


def trained(amp: AmpConfigs | None, steps: int = 6) -> tuple[list[float], paddle.nn.Layer]:
    layer = model()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=layer.parameters(), weight_decay=0.1)
    step = TrainStep(layer, optimizer, loss_fn=loss_of, amp=amp)
    rows = paddle.to_tensor(np.random.default_rng(0).normal(size=[8, 16]).astype("float32"))
    return [step([rows]).loss for _ in range(steps)], layer


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_whole_steps_follow_those_in_float32(level: str) -> None:
    """float16 has 11 bits: 1e-3 relative in each operation, a few times that in the loss."""
    losses, layer = trained(AmpConfigs(dtype="float16", level=level, init_loss_scaling=1024.0))
    wanted, _ = trained(None)
    assert losses[-1] < 0.7 * losses[0]
    assert np.allclose(losses, wanted, rtol=0.03)
    assert losses != wanted
    is_cast = layer[0].weight.dtype == paddle.float16
    assert is_cast is (level == "O2")


def test_an_overflow_skips_the_step(level: str = "O2") -> None:
    losses, layer = trained(
        AmpConfigs(dtype="float16", level=level, init_loss_scaling=2.0**24), steps=1
    )
    assert math.isfinite(losses[0])
    assert np.array_equal(layer[0].weight.numpy(), model()[0].weight.astype("float16").numpy())


def test_recompute_changes_no_bit_of_float16() -> None:
    def gradients(run: object) -> list[np.ndarray]:
        layer = model()
        x = paddle.ones([4, 16])
        x.stop_gradient = False
        with paddle.amp.auto_cast(level="O1", dtype="float16"):
            assert paddle.matmul(x, layer[0].weight).dtype == paddle.float16
            y = (plain if run is plain else recompute)(layer, x)
        y.astype("float32").square().sum().backward()  # outside: as most training loops do
        return [x.grad.numpy(), *(p.grad.numpy() for p in layer.parameters())]

    for one, other in zip(gradients(recompute), gradients(plain), strict=True):
        assert np.array_equal(one, other)
