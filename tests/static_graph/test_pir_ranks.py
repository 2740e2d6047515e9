"""Data-parallel Programs on two gloo ranks, against one process with the joined batch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.base.layer_helper import LayerHelper

from paddle_recompute._paddle.static import ranks
from paddle_recompute.static_graph import mark_checkpoint
from tests.bfloat16 import HAS_BFLOAT16, needs_bfloat16
from tests.processes import python_on_ranks
from tests.ranks import run_ranks
from tests.static_graph.models import (
    BATCH,
    HIDDEN,
    IS_26,
    Run,
    Stack,
    assert_equal,
    data,
    needs_pir,
    num_recomputed,
    static_mode,
    train,
)

ORDER_OF_SUMS = 2e-6
"""Two means of half a batch are added where one process takes one mean: float32 rounding."""


def stack(dropout: float) -> Callable[[], Any]:
    """The loss of marked blocks, for a batch of any size."""

    def build() -> Any:
        x = data(shape=(-1, HIDDEN))
        for index, layer in enumerate(Stack(3, dropout).layers):
            x = mark_checkpoint(layer(x), f"layers.{index}")
        return x.square().mean()

    return build


def sgd() -> Any:
    return paddle.optimizer.SGD(0.3)


def clipped_sgd() -> Any:
    return paddle.optimizer.SGD(0.1, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.05))


def bfloat16() -> Any:
    return (
        contextlib.nullcontext()
        if IS_26
        else paddle.amp.auto_cast(True, level="O1", dtype="bfloat16")
    )


MERGED = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, "avg": True}}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"checkpoints": None, "make_optimizer": sgd},
    "recompute": {"checkpoints": (), "make_optimizer": sgd},
    "each gradient alone": {
        "checkpoints": (),
        "make_optimizer": sgd,
        "fuse_all_reduce_ops": False,
    },
    "clipped": {"checkpoints": (), "make_optimizer": clipped_sgd},
    "merged": {"checkpoints": (), "make_optimizer": sgd, **MERGED, "runs_per_step": 2},
    "dropout": {"checkpoints": (), "dropout": 0.1, "steps": 10},
    "dropout, plain": {"checkpoints": None, "dropout": 0.1, "steps": 10},
    "other weights drawn": {"checkpoints": (), "make_optimizer": sgd, "seed": 100},
}
if HAS_BFLOAT16:
    CASES["bfloat16"] = {"checkpoints": (), "prepare": bfloat16, "amp": True}
    CASES["bfloat16, plain"] = {"checkpoints": None, "prepare": bfloat16, "amp": True}


def joined(random: np.random.RandomState) -> dict[str, np.ndarray]:
    return {"x": random.randn(2 * BATCH, HIDDEN).astype("float32")}


def run_case(feeds: Any, rank: int, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Run:
    build = stack(dropout)

    def seeded() -> Any:
        paddle.seed(7 + seed * rank)
        return build()

    return train(seeded, feeds=feeds, **{"steps": 4, **options})


def worker(folder: Path) -> dict[str, Any]:
    before = Path.cwd()
    os.chdir(folder)
    rank = paddle.distributed.get_rank()

    def own_half(random: np.random.RandomState) -> dict[str, np.ndarray]:
        return {"x": joined(random)["x"][rank * BATCH : (rank + 1) * BATCH]}

    runs = {name: run_case(own_half, rank, **case) for name, case in CASES.items()}
    if not IS_26:
        runs["sparse"] = train(
            sparse_embedding, (), feeds=lambda random: {"ids": np.arange(4) + rank}
        )
    sums = sums_on_ranks()
    os.chdir(before)
    return {**runs, "sums": sums}


def sparse_embedding() -> Any:
    """Its gradient is dense in PIR, and can travel."""
    ids = paddle.static.data("ids", [BATCH], "int64")
    x = paddle.nn.Embedding(5, HIDDEN, sparse=True)(ids)
    return mark_checkpoint(paddle.tanh(paddle.nn.Linear(HIDDEN, HIDDEN)(x)), "c").square().mean()


def sums_on_ranks() -> list[float]:
    rank = paddle.distributed.get_rank()
    with static_mode():
        main = paddle.static.Program()
        with paddle.static.program_guard(main, paddle.static.Program()):
            x = paddle.static.data("x", [2])
            x.stop_gradient = False
            assert not ranks.has_sums(main)
            total = ranks.sum_over_ranks(x)
            assert ranks.has_sums(main) and total.stop_gradient
            feed = {"x": np.array([rank, 1.0], "float32")}
            (found,) = paddle.static.Executor().run(main, feed=feed, fetch_list=[total])
            if IS_26:
                helper = LayerHelper("c_identity")
                same = helper.create_variable_for_type_inference(x.dtype)
                attributes = {"ring_id": 0, "use_calc_stream": True, "use_model_parallel": True}
                helper.append_op(
                    type="c_identity",
                    inputs={"X": [x]},
                    outputs={"Out": [same]},
                    attrs=attributes,
                )
                with pytest.raises(Exception, match="Do not support c_identity for cpu"):
                    paddle.static.Executor().run(main, feed=feed, fetch_list=[same])
            else:
                summed = paddle._C_ops.all_reduce(x * 1.0, 0, 0)
                same = paddle._C_ops.c_identity(x * 1.0, 0, True, True)
                for one in (summed, same):
                    assert paddle.static.gradients([one.sum()], [x]) == [None]
    return list(found.tolist())


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All cases, in one start of the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    results = run_ranks(worker, 2, timeout=180, folder=folder)
    assert not list(folder.iterdir()), "Paddle's http.log is left in the current folder"
    return results


@pytest.mark.parametrize("name", ["recompute", "clipped", "merged"])
def test_one_process_with_the_joined_batch(of_two_ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (results[name] for results in of_two_ranks)
    expected = run_case(joined, 0, **CASES[name])
    means = [(a + b) / 2 for a, b in zip(first.losses, second.losses, strict=True)]
    np.testing.assert_allclose(means, expected.losses, rtol=ORDER_OF_SUMS)
    for parameter, value in expected.parameters.items():
        np.testing.assert_allclose(
            first.parameters[parameter], value, atol=ORDER_OF_SUMS, err_msg=parameter
        )
    if IS_26 and name == "merged":
        return  # fleet divides the sum when it updates
    for step, gradients in enumerate(expected.gradients):
        for parameter, gradient in gradients.items():
            local = (one.gradients[step][parameter] for one in (first, second))
            np.testing.assert_allclose(
                sum(local) / 2, gradient, atol=ORDER_OF_SUMS, err_msg=f"step {step}, {parameter}"
            )


@pytest.mark.parametrize("name", [*CASES, pytest.param("sparse", marks=needs_pir)])
def test_ranks_end_with_the_same_parameters(of_two_ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (results[name] for results in of_two_ranks)
    assert first.losses != second.losses
    assert first.parameters.keys() == second.parameters.keys()
    for parameter, value in first.parameters.items():
        np.testing.assert_array_equal(value, second.parameters[parameter], parameter)


@pytest.mark.parametrize(
    "name", ["recompute", "dropout", pytest.param("bfloat16", marks=needs_bfloat16)]
)
def test_recompute_changes_nothing(of_two_ranks: list[dict[str, Any]], name: str) -> None:
    plain = {"recompute": "plain"}.get(name, f"{name}, plain")
    for results in of_two_ranks:
        assert num_recomputed(results[name]) > 0
        assert_equal(results[name], results[plain])


def test_size_of_buffers_changes_nothing(of_two_ranks: list[dict[str, Any]]) -> None:
    for results in of_two_ranks:
        assert_equal(results["each gradient alone"], results["recompute"])


def test_every_rank_starts_with_the_weights_of_rank_0(of_two_ranks: list[dict[str, Any]]) -> None:
    assert_equal(of_two_ranks[0]["other weights drawn"], of_two_ranks[0]["recompute"])
    assert_equal(of_two_ranks[1]["other weights drawn"], of_two_ranks[1]["recompute"])


def test_sums_over_ranks_which_have_no_gradient(of_two_ranks: list[dict[str, Any]]) -> None:
    """If a rank fails here, rows can be gathered with their gradients, and each rank can score its
    own rows alone: `contrastive._gather_static`."""
    assert [results["sums"] for results in of_two_ranks] == [[1.0, 2.0]] * 2


ALL_STATIC = """
import paddle
paddle.enable_static()
paddle.distributed.fleet.init(is_collective=True)
paddle.disable_static()
from tests.static_graph.test_pir_ranks import CASES, joined, run_case
run = run_case(joined, paddle.distributed.get_rank(), seed=5, checkpoints=())
print("losses", run.losses)
"""


def test_ranks_that_never_were_in_dygraph(tmp_path: Path) -> None:
    """A script of a static job does not call ``init_parallel_env``; fleet leaves a log there."""
    alone = run_case(joined, 0, checkpoints=())
    for output in python_on_ranks("-c", ALL_STATIC, folder=tmp_path):
        assert f"losses {alone.losses}" in output, output[-3000:]
