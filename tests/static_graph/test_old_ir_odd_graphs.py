"""Recompute changes no bit of odd graphs either, in Programs of Paddle 2.6."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.errors import StaticGraphError
from paddle_recompute.static_graph import mark_checkpoint, minimize
from tests.bfloat16 import needs_bfloat16
from tests.ranks import run_ranks
from tests.static_graph import test_pir_recompute as graphs
from tests.static_graph.models import (
    HIDDEN,
    Stack,
    assert_equal,
    assert_recompute_changes_nothing,
    data,
    marked_stack,
    num_recomputed,
    strategy_of,
    train,
)
from tests.static_graph.old_ir_programs import needs_old_ir

pytestmark = needs_old_ir


@pytest.mark.parametrize(
    "build",
    [
        graphs.attention_with_a_mask,
        graphs.shared_layer,
        graphs.tied_weights,
        graphs.batch_norm,
        graphs.alpha_dropout,
        graphs.random_inside,
        graphs.dropout_along_an_axis,
        graphs.split_and_concat,
        graphs.checkpoint_among_several_results,
        graphs.branch_inside,
        graphs.loop_inside,
        graphs.frozen_parameters,
        graphs.two_losses,
        graphs.skip_connections,
        graphs.changed_in_place,
        graphs.evaluated_dropout,
        graphs.fixed_seed_dropout,
        graphs.constants_and_integers,
        graphs.unknown_batch,
        graphs.weight_arithmetic,
    ],
    ids=lambda build: build.__name__,
)
def test_odd_graph(build: Callable[[], Any]) -> None:
    assert_recompute_changes_nothing(build)


def test_odd_graph_with_other_feeds() -> None:
    assert_recompute_changes_nothing(graphs.embedding_first, feeds=graphs.ids)
    assert_recompute_changes_nothing(graphs.convolution, feeds=graphs.images)


@pytest.mark.parametrize(
    "clip",
    [
        lambda: paddle.nn.ClipGradByGlobalNorm(0.05),
        lambda: paddle.nn.ClipGradByNorm(0.02),
        lambda: paddle.nn.ClipGradByValue(0.001),
    ],
    ids=["global_norm", "norm", "value"],
)
def test_gradient_clip(clip: Callable[[], Any]) -> None:
    clipped = assert_recompute_changes_nothing(
        marked_stack, make_optimizer=lambda: paddle.optimizer.SGD(0.5, grad_clip=clip())
    )
    free = train(marked_stack, (), make_optimizer=lambda: paddle.optimizer.SGD(0.5))
    name = next(iter(free.parameters))
    assert not np.array_equal(clipped.parameters[name], free.parameters[name])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"amp": True}, marks=needs_bfloat16),
        {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": True}},
        pytest.param(
            {"amp": True, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
            marks=needs_bfloat16,
        ),
    ],
    ids=["amp", "merge", "amp_and_merge"],
)
def test_with_the_rest_of_the_strategy(settings: dict[str, Any]) -> None:
    run = assert_recompute_changes_nothing(marked_stack, steps=4, **settings)
    assert len(set(run.losses)) == 4


def test_frozen_parameters_stay() -> None:
    def build() -> Any:
        x = data()
        frozen = paddle.nn.Linear(HIDDEN, HIDDEN, weight_attr=paddle.ParamAttr("frozen"))
        frozen.weight.stop_gradient = True
        for number in range(2):
            x = mark_checkpoint(paddle.tanh(frozen(x)) + x, f"c{number}")
        return x.square().mean()

    two, three = (train(build, (), steps=steps) for steps in (2, 3))
    assert "frozen" in two.parameters and "frozen" not in two.gradients[0]
    np.testing.assert_array_equal(two.parameters["frozen"], three.parameters["frozen"])


def on_ranks(folder: Path) -> list[Any]:
    """With recompute and without; every rank has its half of the batch of one process."""
    os.chdir(folder)
    rank = paddle.distributed.get_rank()

    def half(random: np.random.RandomState) -> dict[str, np.ndarray]:
        return {"x": np.split(whole_batch(random)["x"], 2)[rank]}

    settings = {"fuse_grad_size_in_MB": 1, "feeds": half, "make_optimizer": sgd}
    return [train(stack_of_any_batch, names, **settings) for names in ((), None)]


def whole_batch(random: np.random.RandomState) -> dict[str, np.ndarray]:
    return {"x": random.randn(8, HIDDEN).astype("float32")}


def stack_of_any_batch() -> Any:
    x = data(shape=(-1, HIDDEN))
    for index, layer in enumerate(Stack(2, dropout=0.0).layers):
        x = mark_checkpoint(layer(x), f"layers.{index}")
    return x.square().mean()


def sgd() -> Any:
    return paddle.optimizer.SGD(0.3)


# The mean of two halves and the mean of the whole: sums in another order.
SAME_SUM_IN_ANOTHER_ORDER = 1e-6


def test_a_second_optimizer_is_refused() -> None:
    """fleet's own second minimize ends the process with SIGSEGV (2.6.2)."""

    def build() -> Any:
        loss = marked_stack()
        minimize(paddle.optimizer.SGD(0.1), loss, strategy_of(("layers.0",)))
        return loss

    with pytest.raises(StaticGraphError, match="has an optimizer already"):
        train(build, None)


def test_two_ranks_are_one_process(tmp_path: Path) -> None:
    ranks = run_ranks(on_ranks, 2, folder=tmp_path)
    assert not list(tmp_path.iterdir()), "Paddle's http.log is left in the current folder"
    for recomputed, plain in ranks:
        assert num_recomputed(recomputed) > 0
        assert_equal(recomputed, plain)
    (mine, _), (other, _) = ranks
    one = train(stack_of_any_batch, (), feeds=whole_batch, make_optimizer=sgd)
    for name, value in one.parameters.items():
        np.testing.assert_array_equal(mine.parameters[name], other.parameters[name])
        assert np.abs(mine.parameters[name] - value).max() < SAME_SUM_IN_ANOTHER_ORDER, name
