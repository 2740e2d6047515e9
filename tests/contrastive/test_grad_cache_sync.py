"""GradCache on two real ranks: the gradient of the joined batch, sent once, while it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
import pytest

from paddle_recompute import ContrastiveLoss, GradCache, GradientSync
from paddle_recompute.errors import ConfigError
from tests.contrastive.encoders import (
    BATCH,
    LENGTH,
    Gradients,
    gradients,
    make,
    one_shot,
    parameters,
    relative_difference,
    same_bits,
    texts,
)
from tests.ranks import run_ranks

TOLERANCE = 1e-5
"""Two ranks add up the rows of a batch in another order than one process."""

SMALL = {"bucket_bytes": 4000, "first_bucket_bytes": 1000}


class Criterion(paddle.nn.Layer):
    """ContrastiveLoss behind a normalisation and a factor that is learnt."""

    def __init__(self, negatives: Any, tile: int | None = None) -> None:
        super().__init__()
        self.factor = self.create_parameter(
            [1], default_initializer=paddle.nn.initializer.Constant(1.5)
        )
        self.loss = ContrastiveLoss(0.2, negatives=negatives, tile=tile)

    def forward(self, query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        return self.loss(F.normalize(query, axis=-1) * self.factor, F.normalize(positive, axis=-1))


def batch(step: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    return texts(2 * step, BATCH, LENGTH), texts(2 * step + 1, BATCH, LENGTH)


def own(ids: paddle.Tensor, more: int = 0) -> paddle.Tensor:
    """The rows of this rank of two: half of them, and `more` on rank 0."""
    first_of_second = BATCH // 2 + more
    return ids[:first_of_second] if dist.get_rank() == 0 else ids[first_of_second:]


STEPS = 3


def train(
    towers: int,
    negatives: str,
    chunks: dict[str, int],
    mode: Any = "overlap",
    wrap: bool = False,
    tile: int | None = None,
    more: int = 0,
) -> dict[str, Any]:
    """Three steps without an update: gradients, and what the sync has done."""
    encoders, loss = make(towers, dropout=0.0), Criterion(negatives, tile)
    trained = parameters(encoders, loss)
    model: Any = trained
    if wrap:
        encoders = model = paddle.DataParallel(encoders)
        trained = parameters(encoders)
    sync = GradientSync(model, mode=mode, **SMALL)
    cache = GradCache(encoders, loss, sync=sync, **chunks)
    found, losses, early, local = [], [], [], []
    for step in range(STEPS):
        query, positive = batch(step)
        losses.append(cache.backward(own(query, more), own(positive, more)).item())
        early.append(sync.num_early_buckets)
        found.append([p.grad.numpy().copy() for p in trained])
        for parameter in trained:
            parameter.clear_gradient(False)
        cache.backward(own(query, more), own(positive, more), last=False)
        local.append([p.grad.numpy().copy() for p in trained])
        for parameter in trained:
            parameter.clear_gradient(False)
    return {
        "gradients": found,
        "local": local,
        "losses": losses,
        "early": early,
        "num_synchronized": sync.num_synchronized,
    }


def joined_batch(towers: int, negatives: str, *, with_loss: bool = True) -> list[Gradients]:
    """The plain step of one process over the whole batch (local: over each half)."""
    encoders, loss = make(towers, dropout=0.0), Criterion("local")
    result = []
    for step in range(STEPS):
        query, positive = batch(step)
        if negatives == "global":
            one_shot(encoders, loss, query, positive)
        else:
            half = BATCH // 2
            for rows in (slice(0, half), slice(half, BATCH)):
                one_shot(encoders, loss, query[rows], positive[rows], scale=0.5)
        result.append(gradients(*((encoders, loss) if with_loss else (encoders,))))
    return result


CASES: dict[str, dict[str, Any]] = {
    "tied, rows": {"towers": 1, "negatives": "global", "chunks": {"chunk_size": 5}},
    "tied, rows, tiles, uneven ranks": {
        "towers": 1,
        "negatives": "global",
        "chunks": {"chunk_size": 5},
        "tile": 7,
        "more": 3,
    },
    "pair, tokens": {"towers": 2, "negatives": "global", "chunks": {"chunk_tokens": 20}},
    "pair, rows, fused": {
        "towers": 2,
        "negatives": "local",
        "chunks": {"chunk_size": 5},
        "mode": "fused",
    },
    "tied, tokens": {"towers": 1, "negatives": "local", "chunks": {"chunk_tokens": 20}},
    "DataParallel": {
        "towers": 1,
        "negatives": "local",
        "chunks": {"chunk_size": 5},
        "wrap": True,
    },
}


def train_every_case() -> dict[str, Any]:
    return {name: train(**options) for name, options in CASES.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What `train` returned, for each rank and case: the ranks are started once."""
    return run_ranks(train_every_case, num_ranks=2)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_one_process_with_the_joined_batch(
    case: str, results: list[dict[str, Any]]
) -> None:
    first, second = (rank[case] for rank in results)
    options = CASES[case]
    wrapped = options.get("wrap", False)  # then the loss's own parameter is not synchronized
    expected = joined_batch(options["towers"], options["negatives"], with_loss=not wrapped)
    for step in range(STEPS):
        assert same_bits(first["gradients"][step], second["gradients"][step])
        assert relative_difference(first["gradients"][step], expected[step]) < TOLERANCE
        assert not same_bits(first["local"][step], second["local"][step]), "last=False is local"
    for rank in (first, second):
        assert rank["num_synchronized"] == STEPS, "once per step, and not with last=False"
        if options.get("mode") != "fused":
            assert rank["early"][0] == 0, "the first step learns the order"
            assert min(rank["early"][1:]) > 0


def accumulate_and_refuse() -> dict[str, Any]:
    encoder, loss = make(1, dropout=0.0), Criterion("local")
    sync = GradientSync(parameters(encoder, loss), mode="overlap", **SMALL)
    cache = GradCache(encoder, loss, chunk_size=5, sync=sync)
    for step in range(STEPS):
        query, positive = batch(step)
        cache.backward(own(query), own(positive), last=step == STEPS - 1, loss_scale=1 / STEPS)
    try:
        GradCache(paddle.DataParallel(encoder), loss, chunk_size=5)
        message = ""
    except ConfigError as error:
        message = str(error)
    return {
        "gradients": gradients(encoder, loss),
        "num_synchronized": sync.num_synchronized,
        "message": message,
    }


def test_accumulation_and_data_parallel_without_a_sync() -> None:
    first, second = run_ranks(accumulate_and_refuse, num_ranks=2)
    steps = joined_batch(1, "local")
    expected = [np.mean(each, axis=0) for each in zip(*steps, strict=True)]
    assert same_bits(first["gradients"], second["gradients"])
    assert relative_difference(first["gradients"], expected) < TOLERANCE
    assert first["num_synchronized"] == second["num_synchronized"] == 1
    assert "pass sync=GradientSync(encoder)" in first["message"]
