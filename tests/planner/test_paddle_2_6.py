"""Paddle 2.6 cannot start the peak anew: it says so, and applies plans that were made elsewhere."""

from __future__ import annotations

import paddle
import pytest

from paddle_recompute import plan
from paddle_recompute._paddle import memory
from paddle_recompute.errors import DependencyError


@pytest.mark.skipif(memory.can_reset_peak(), reason="this Paddle can")
def test_it_is_refused() -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4))
    with pytest.raises(DependencyError, match="Paddle 3"):
        plan(model, paddle.randn([2, 4]), lambda m, x: m(x).mean(), memory_budget=2**30)
