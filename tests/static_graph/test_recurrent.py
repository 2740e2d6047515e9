"""Recurrent Layers in a Program: they run again, unless they drop something out inside."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.static_graph import mark_checkpoint
from tests.static_graph.models import BATCH, HIDDEN, assert_recompute_changes_nothing, data

LENGTH = 6


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("kind", [paddle.nn.LSTM, paddle.nn.GRU, paddle.nn.SimpleRNN])
def test_it_runs_again_where_it_draws_nothing(kind: Any, dropout: float) -> None:
    def build() -> Any:
        x = data(shape=(BATCH, LENGTH, HIDDEN))
        for number in range(2):
            layer = kind(HIDDEN, HIDDEN, num_layers=2, dropout=dropout)
            norm = paddle.nn.LayerNorm(HIDDEN)
            x = mark_checkpoint(norm(x + layer(x)[0]), f"layers.{number}")
        return x.square().mean()

    def feeds(random: np.random.RandomState) -> dict[str, np.ndarray]:
        return {"x": random.randn(BATCH, LENGTH, HIDDEN).astype("float32")}

    run = assert_recompute_changes_nothing(build, feeds=feeds)
    kept = {name.removeprefix("pd_op.") for part in run.report.segments for name in part.kept_ops}
    assert ("rnn" in kept) == bool(dropout)
