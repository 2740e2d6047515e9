"""Programs on two gloo ranks: `minimize`, the loss over all pairs, a rank that dies."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import distributed as dist
from paddle.static import InputSpec

from paddle_recompute import ContrastiveLoss
from paddle_recompute._paddle.static import ranks
from paddle_recompute.distributed import barrier, peers
from paddle_recompute.errors import DataError, PeerError, SyncError
from paddle_recompute.static_graph import ProgramCache, StaticTrainStep, mark_checkpoint
from tests.bfloat16 import needs_bfloat16
from tests.distributed.mortal_ranks import results_of
from tests.distributed.test_mortal_ranks import Death
from tests.processes import python_on_ranks
from tests.ranks import run_ranks
from tests.static_graph.models import (
    BATCH,
    HIDDEN,
    IS_26,
    Run,
    Stack,
    assert_equal,
    assert_equal_arrays,
    building,
    data,
    num_recomputed,
    train,
)
from tests.static_graph.test_grad_cache import Encoder, loss_of, vectors
from tests.static_graph.test_train_step import (
    BFLOAT16_ON,
    SAME_NUMBERS,
    SAME_PARAMETERS,
    arrays_of,
    assert_same,
    config_of,
    in_dygraph,
    moments_of,
    tensors,
)

# ------------------------------------------------------------------------------- `minimize`


def stack() -> Any:
    """The loss of marked blocks, for a batch of any size."""
    x = data(shape=(-1, HIDDEN))
    for index, layer in enumerate(Stack(3).layers):
        x = mark_checkpoint(layer(x), f"layers.{index}")
    return x.square().mean()


def sparse_embedding() -> Any:
    """Its gradient is dense in PIR, and can travel."""
    ids = paddle.static.data("ids", [BATCH], "int64")
    x = paddle.nn.Embedding(5, HIDDEN, sparse=True)(ids)
    return mark_checkpoint(paddle.tanh(paddle.nn.Linear(HIDDEN, HIDDEN)(x)), "c").square().mean()


CASES: dict[str, dict[str, Any]] = {
    "plain": {"checkpoints": None},
    "recompute": {"checkpoints": ()},
    "each gradient alone": {"checkpoints": (), "fuse_all_reduce_ops": False},
}
if not IS_26:
    CASES["sparse"] = {"checkpoints": (), "build": sparse_embedding}


def run_case(rank: int, *, build: Callable[[], Any] = stack, **options: Any) -> Run:
    """Train with the half of each batch that is this rank's."""

    def own_half(random: np.random.RandomState) -> dict[str, np.ndarray]:
        if build is sparse_embedding:
            return {"ids": np.arange(BATCH) + rank}
        both = random.randn(2 * BATCH, HIDDEN).astype("float32")
        return {"x": both[rank * BATCH : (rank + 1) * BATCH]}

    return train(build, feeds=own_half, steps=3, **options)


def worker(folder: Path) -> tuple[dict[str, Run], list[float]]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        runs = {name: run_case(dist.get_rank(), **case) for name, case in CASES.items()}
        return runs, sums_on_ranks()
    finally:
        os.chdir(before)


def sums_on_ranks() -> list[float]:
    with building() as main:
        x = data(shape=[2])
        assert not ranks.has_sums(main)
        total = ranks.sum_over_ranks(x)
        assert ranks.has_sums(main) and total.stop_gradient
        feed = {"x": np.array([dist.get_rank(), 1.0], "float32")}
        (found,) = paddle.static.Executor().run(main, feed=feed, fetch_list=[total])
        return list(found.tolist())


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Run]]:
    """All cases, in one start of the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    results = run_ranks(worker, 2, timeout=180, folder=folder)
    assert not list(folder.iterdir()), "Paddle's http.log is left in the current folder"
    assert [sums for _, sums in results] == [[1.0, 2.0]] * 2
    return [runs for runs, _ in results]


@pytest.mark.parametrize("name", CASES)
def test_ranks_end_with_the_same_parameters(of_two_ranks: list[dict[str, Run]], name: str) -> None:
    first, second = (runs[name] for runs in of_two_ranks)
    assert first.losses != second.losses
    assert_equal_arrays(first.parameters, second.parameters)


def test_neither_recompute_nor_the_size_of_buffers_changes_a_bit(
    of_two_ranks: list[dict[str, Run]],
) -> None:
    for runs in of_two_ranks:
        assert num_recomputed(runs["recompute"]) > 0
        assert_equal(runs["recompute"], runs["plain"])
        assert_equal(runs["recompute"], runs["each gradient alone"])


ALL_STATIC = """
import paddle
paddle.enable_static()
paddle.distributed.fleet.init(is_collective=True)
paddle.disable_static()
from tests.static_graph.test_ranks import CASES, run_case
run = run_case(paddle.distributed.get_rank(), **CASES["recompute"])
print("parameters", {name: float(value.sum()) for name, value in run.parameters.items()})
"""


def test_ranks_that_never_were_in_dygraph(tmp_path: Path) -> None:
    """A script of a static job does not call ``init_parallel_env``; fleet leaves a log there."""
    outputs = python_on_ranks("-c", ALL_STATIC, folder=tmp_path)
    one, other = (re.search("parameters ({.*})", output) for output in outputs)
    assert one is not None and other is not None and one[1] == other[1], outputs


# ------------------------------------------------------ the loss over the pairs of all ranks

NUM_PAIRS, HARD, STEPS = 6, 2, 2


class Pairs(paddle.nn.Layer):
    """Two towers that share an encoder, and the loss, which may have a parameter too."""

    def __init__(self, tile: int | None = 8) -> None:
        super().__init__()
        self.layers = Stack(2, dropout=0.0).layers
        self.criterion = ContrastiveLoss(
            0.2,
            normalize=True,
            learnable_temperature=True,
            mask_false_negatives=True,
            label_smoothing=0.2,
            tile=tile,
        )

    def encode(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, batch: dict[str, Any]) -> Any:
        names = {"query": "query", "positive": "positive", "hard": "hard_negatives"}
        vectors = {argument: self.encode(batch[name]) for name, argument in names.items()}
        ids = {name: batch[name] for name in batch if name.endswith("ids")}
        return self.criterion(**vectors, **ids)


def pairs() -> list[dict[str, Any]]:
    rng = np.random.default_rng(2)
    ids = np.arange(NUM_PAIRS * HARD).reshape(NUM_PAIRS, HARD)
    return [
        {
            "query": rng.standard_normal((NUM_PAIRS, HIDDEN), "float32"),
            "positive": rng.standard_normal((NUM_PAIRS, HIDDEN), "float32"),
            "hard": rng.standard_normal((NUM_PAIRS, HARD, HIDDEN), "float32"),
            # Equal in all but the last of 64 bits; the first is equal to one of the other rank.
            "positive_ids": (-(2**62) + np.array([1, 2, 3, 1, 5, 6])).astype("int64"),
            "negative_ids": (-(2**62) + 2 + ids).astype("int64"),
        }
        for _ in range(STEPS)
    ]


def share(batch: dict[str, Any], rank: int) -> dict[str, Any]:
    return {name: np.split(array, 2)[rank] for name, array in batch.items()}


def loss_of_pairs(towers: Pairs, batch: dict[str, Any]) -> Any:
    return towers(batch)


def pair_step(*, any_size: bool = False) -> StaticTrainStep:
    def model() -> Pairs:
        paddle.seed(5)
        return Pairs(tile=None if any_size else 8)

    spec = {
        name: InputSpec([-1, *array.shape[1:]], str(array.dtype))
        for name, array in pairs()[0].items()
    }
    return StaticTrainStep(config_of(), model, loss_of_pairs, input_spec=spec if any_size else None)


def trained_on_pairs() -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Losses and norms, and the state before and after."""
    step = pair_step()
    first, *_ = batches = [share(batch, dist.get_rank()) for batch in pairs()]
    step.build(first)
    before = step.state_dict()["model"]
    results = [step([batch]) for batch in batches]
    return [one for two in results for one in (two.loss, two.grad_norm)], before, step.state_dict()


def one_more_on_a_rank() -> str:
    rank = dist.get_rank()
    one_more = {name: array[: 3 - rank] for name, array in share(pairs()[0], rank).items()}
    # A PeerError where the other rank, which sees it too, was first to end the run.
    with pytest.raises((DataError, PeerError)) as caught:
        pair_step(any_size=True)([one_more])
    return str(caught.value)


def test_numbers_of_rows_that_differ_are_refused() -> None:
    for message in results_of(one_more_on_a_rank):
        assert re.search("and another rank has other numbers; .*negatives: local", message)


def test_negatives_of_all_ranks() -> None:
    """As in dygraph, on one process with the pairs of both."""
    (results, before, state), (others, _, other_state) = run_ranks(trained_on_pairs, 2, timeout=110)
    assert results == others
    for section, value in state.items():
        assert_same(value, other_state[section])

    model = Pairs()
    model.set_state_dict({name: paddle.to_tensor(one) for name, one in before.items()})
    optimizer, dygraph = in_dygraph(config_of(), model, loss_fn=loss_of_pairs)
    expected = []
    for batch in pairs():
        result = dygraph([tensors(batch)])
        expected += [result.loss, result.grad_norm]
    assert results == pytest.approx(expected, rel=10 * SAME_NUMBERS)
    assert_same(state["model"], arrays_of(model), SAME_PARAMETERS)
    assert_same(state["optimizer"], moments_of(model, optimizer), SAME_PARAMETERS)


class Scaled(paddle.nn.Layer):
    """Vectors without a matrix product; one whose result is not used lets mixed precision act."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter(
            [HIDDEN], default_initializer=paddle.nn.initializer.Constant(1.5)
        )
        self.idle = paddle.nn.Linear(HIDDEN, HIDDEN)
        self.criterion = ContrastiveLoss(0.02, normalize=True)

    def forward(self, batch: dict[str, Any]) -> Any:
        query, positive = (batch[name] * self.scale for name in ("query", "positive"))
        return self.criterion(query, positive) + self.idle(batch["query"]).mean() * 0.0


@needs_bfloat16
def test_the_loss_is_in_float32_whatever_the_encoder_is_in() -> None:
    """Scores times 50 in bfloat16, with 8 bits, would be noise."""

    def losses(*overrides: str) -> list[float]:
        step = StaticTrainStep(config_of(*overrides, recompute=False), Scaled, loss_of_pairs)
        return [step([batch]).loss for batch in pairs()]

    assert losses(*BFLOAT16_ON) == losses()


# ------------------------------------------------------------------------ the start values


class Normed(paddle.nn.Layer):
    """Each rank's Program writes statistics of its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = paddle.nn.Linear(HIDDEN, HIDDEN), paddle.nn.BatchNorm1D(HIDDEN)

    def forward(self, batch: Any) -> Any:
        return self.norm(self.linear(batch[0])).square().mean()


def resumed_with_statistics_of_its_own() -> dict[str, str]:
    """What the first step of a new Program says, by what of the state it has been given."""

    def made() -> StaticTrainStep:
        return StaticTrainStep(config_of(recompute=False), Normed, lambda model, x: model(x))

    def step(one: StaticTrainStep) -> object:
        return one([[np.full([BATCH, HIDDEN], 1.0 + dist.get_rank(), "float32")]])

    first = made()
    step(first)
    whole = first.state_dict()
    apart = {**whole["model"], "linear.bias": whole["model"]["linear.bias"] + dist.get_rank()}
    told = {}
    for name, state in {
        "resumed": whole,
        "of other parameters": {**whole, "model": apart},
        "without moments": {"model": whole["model"]},
    }.items():
        again = made()
        again.set_state_dict(state)
        try:
            with mock.patch.object(peers(), "fail"):
                step(again)
            told[name] = "goes on"
        except SyncError as error:
            told[name] = str(error).partition(" ")[0]
        barrier()
    return told


def test_a_resumed_program_has_the_statistics_of_each_rank() -> None:
    expected = {
        "resumed": "goes on",
        "of other parameters": "'linear.bias'",
        "without moments": "'norm._mean'",
    }
    assert run_ranks(resumed_with_statistics_of_its_own, 2) == [expected] * 2


# ------------------------------------------------------------------------- a rank that dies


class Wide(paddle.nn.Layer):
    """Most of a step is the exchange of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = paddle.nn.LayerList([paddle.nn.Linear(HIDDEN, HIDDEN)])
        self.wide = paddle.nn.Linear(HIDDEN, 200_000)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.wide(self.layers[0](x))[:, :4].square().mean()


def train_programs(cached: bool) -> None:
    config = config_of("sync.peer_timeout=4", recompute=False)
    if cached:
        step = StaticTrainStep(config, Encoder, grad_cache=ProgramCache(loss_of(), chunk_size=3))
    else:
        step = StaticTrainStep(config, Wide, lambda model, batch: model(batch[0]))
    for number in range(1, 1_000_000):
        step([vectors(number)])
        if number <= 3:
            print(f"step {number} done", flush=True)


@pytest.mark.parametrize("cached", [False, True], ids=["one Program", "a gradient cache"])
def test_the_other_rank_ends_in_error_and_names_the_rank(cached: bool) -> None:
    killed = Death(
        1, worker=train_programs, arguments={"cached": cached}, signal_number=signal.SIGKILL
    )
    death = killed.happen()
    assert death.code == 1
    assert re.match(r"rank 1 on \S+ has died .* Rank 0 waited .* for ", death.message), (
        death.message
    )
