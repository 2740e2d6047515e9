"""A BatchNorm in a Program runs again without touching its running statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.static_graph import mark_checkpoint
from tests.static_graph.models import BATCH, Run, assert_recompute_changes_nothing, data

nn = paddle.nn
CHANNELS = 3
SHAPE = (BATCH, CHANNELS, 6, 6)


def images(random: np.random.RandomState) -> dict[str, np.ndarray]:
    return {"x": (random.randn(*SHAPE) * 3 + 1).astype("float32")}


def convolutions(norm: Callable[[], Any]) -> Callable[[], Any]:
    """Blocks of convolution, norm and ReLU, twice in each block."""

    def build() -> Any:
        x = data(shape=SHAPE)
        for number in range(3):
            for _ in range(2):
                x = nn.functional.relu(norm()(nn.Conv2D(CHANNELS, CHANNELS, 3, padding=1)(x)))
            x = mark_checkpoint(x, f"blocks.{number}")
        return x.square().mean()

    return build


def in_eval() -> Any:
    norm = nn.BatchNorm2D(CHANNELS)
    norm.eval()
    return norm


def kept(run: Run) -> set[str]:
    return {name for part in run.report.segments for name in part.kept_ops}


def is_kept(run: Run) -> bool:
    return any("batch_norm" in name for name in kept(run))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_it_runs_again(momentum: float) -> None:
    build = convolutions(lambda: nn.BatchNorm2D(CHANNELS, momentum=momentum))
    run = assert_recompute_changes_nothing(build, feeds=images, steps=4)
    assert not is_kept(run), kept(run)
    moved = [name for name in run.parameters if name.endswith(("w_1", "w_2"))]
    assert len(moved) == 12  # running means and variances: they were compared as well


def test_one_that_is_called_many_times() -> None:
    def build() -> Any:
        norm, x = nn.BatchNorm2D(CHANNELS), data(shape=SHAPE)
        for number in range(3):
            x = nn.Conv2D(CHANNELS, CHANNELS, 3, padding=1)(norm(x))
            x = mark_checkpoint(nn.functional.relu(norm(x)), f"blocks.{number}")
        return x.square().mean()

    assert not is_kept(assert_recompute_changes_nothing(build, feeds=images, steps=4))


@pytest.mark.parametrize("norm", [in_eval, lambda: nn.BatchNorm2D(CHANNELS, use_global_stats=True)])
def test_one_that_reads_its_running_statistics_is_right(norm: Callable[[], Any]) -> None:
    assert_recompute_changes_nothing(convolutions(norm), feeds=images)


def test_statistics_that_the_program_reads_are_those_of_the_forward() -> None:
    def build() -> Any:
        x, norm = data(shape=SHAPE), nn.BatchNorm2D(CHANNELS)
        for number in range(2):
            x = norm(nn.Conv2D(CHANNELS, CHANNELS, 3, padding=1)(x))
            x = mark_checkpoint(nn.functional.gelu(x) * norm._mean.sum(), f"blocks.{number}")
        return x.square().mean()

    assert_recompute_changes_nothing(build, feeds=images, steps=4)
