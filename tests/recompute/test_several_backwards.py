"""Several backwards through one call (``retain_graph=True``) share its second forward.

Their gradients are compared in `test_engine` and `test_keep`.
"""

from __future__ import annotations

import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import RecomputeConfig, apply_recompute, recompute
from paddle_recompute._paddle import memory
from paddle_recompute.errors import RecomputeError
from tests.recompute.contract import leaf

WIDTH = 4


class Counted(paddle.nn.Layer):
    """A block with dropout that counts its forwards."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(width, width)
        self.runs = 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.runs += 1
        return F.dropout(self.linear(x).tanh().exp(), 0.3)


def test_the_function_runs_once_more_for_all_of_them() -> None:
    layers = [Counted(), Counted()]
    y = leaf(3, WIDTH) * 2
    for layer in layers:
        y = recompute(layer, y)
    for _ in range(3):
        y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert [layer.runs for layer in layers] == [2, 2]


def test_what_they_hold_and_until_when() -> None:
    model = paddle.nn.Sequential(*[Counted(64) for _ in range(3)])
    apply_recompute(model, RecomputeConfig(checkpoints=["*"]))
    x = leaf(64, 64)

    def backward(y: paddle.Tensor, retain_graph: bool) -> int:
        y.sum().backward(retain_graph=retain_graph)
        x.clear_gradient()
        model.clear_gradients()
        return memory.current_bytes()

    y = model(x)
    backward(y, False)
    del y
    before = memory.current_bytes()
    y = model(x)
    forward = memory.current_bytes()
    # Of each call the outputs of tanh and exp, and the mask, of one byte per element.
    assert backward(y, True) - forward == 3 * 64 * 64 * (4 + 4 + 1)
    assert backward(y, True) - forward == 3 * 64 * 64 * (4 + 4 + 1)
    backward(y, False)
    del y
    assert memory.current_bytes() == before
    y = model(x)
    backward(y, True)
    del y
    assert memory.current_bytes() == before


def test_a_tensor_that_changes_between_the_backwards_is_refused() -> None:
    layer = Counted()
    y = recompute(layer, leaf(3, WIDTH) * 2)
    y.sum().backward(retain_graph=True)
    with paddle.no_grad():
        layer.linear.weight.scale_(2.0)
    with pytest.raises(RecomputeError, match="changed in place"):
        y.sum().backward()
