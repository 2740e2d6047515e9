"""GradCache on two real ranks: the gradient of the joined batch, sent once, while it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
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


def batch(step: int) -> tuple[paddle.Tensor, paddle.Tensor]:
    return texts(2 * step, BATCH, LENGTH), texts(2 * step + 1, BATCH, LENGTH)


def own(ids: paddle.Tensor, more: int = 0) -> paddle.Tensor:
    """The rows of this rank of two: half of them, and `more` on rank 0."""
    first_of_second = BATCH // 2 + more
    return ids[:first_of_second] if dist.get_rank() == 0 else ids[first_of_second:]


STEPS = 2


def square(gradient: paddle.Tensor) -> paddle.Tensor:
    return gradient * gradient


def made(towers: int, negatives: Any, hooked: bool, tile: int | None = None) -> tuple[Any, Any]:
    """The encoders and the loss; with hooks that are not linear on a parameter of each."""
    encoders = make(towers, dropout=0.0)
    loss = ContrastiveLoss(
        0.2, negatives=negatives, tile=tile, normalize=True, learnable_temperature=True
    )
    if hooked:
        encoders.words.weight.register_hook(square)
        loss.logit_scale.register_hook(square)
    return encoders, loss


def train(
    towers: int,
    negatives: str,
    chunks: dict[str, int],
    mode: Any = "overlap",
    wrap: bool = False,
    hooked: bool = False,
    tile: int | None = None,
    more: int = 0,
) -> dict[str, Any]:
    """Steps without an update: gradients, and what the sync has done."""
    encoders, loss = made(towers, negatives, hooked, tile)
    trained = (encoders,) if wrap else (encoders, loss)
    if wrap:
        encoders = paddle.DataParallel(encoders)
    sync = GradientSync(encoders if wrap else parameters(*trained), mode=mode, **SMALL)
    cache = GradCache(encoders, loss, sync=sync, **chunks)
    found: dict[str, Any] = {"gradients": [], "early": [], "local": []}
    for step in range(STEPS):
        query, positive = batch(step)
        cache.backward(own(query, more), own(positive, more))
        found["early"].append(sync.num_early_buckets)
        found["gradients"].append(gradients(*trained))
        cache.backward(own(query, more), own(positive, more), last=False)
        found["local"].append(gradients(*trained))
    return {**found, "num_synchronized": sync.num_synchronized}


def joined_batch(
    towers: int, negatives: str, *, wrap: bool = False, hooked: bool = False
) -> list[Gradients]:
    """The plain step of one process over the whole batch (local: the mean of both halves')."""
    encoders, loss = made(towers, "local", hooked)
    trained = (encoders,) if wrap else (encoders, loss)  # then the loss's is not synchronized
    half = BATCH // 2
    parts = [slice(None)] if negatives == "global" else [slice(half), slice(half, BATCH)]
    result = []
    for step in range(STEPS):
        query, positive = batch(step)
        each = []
        for rows in parts:
            one_shot(encoders, loss, query[rows], positive[rows])
            each.append(gradients(*trained))
        result.append([sum(of_parts) / len(parts) for of_parts in zip(*each, strict=True)])
    return result


ROWS, TOKENS = {"chunk_size": 5}, {"chunk_tokens": 20}
CASES: dict[str, dict[str, Any]] = {
    "tied, rows": {"towers": 1, "negatives": "global", "chunks": ROWS},
    "tied, rows, tiles, uneven ranks": {
        **{"towers": 1, "negatives": "global", "chunks": ROWS},
        **{"tile": 7, "more": 3},
    },
    "pair, tokens": {"towers": 2, "negatives": "global", "chunks": TOKENS},
    "pair, rows, fused": {"towers": 2, "negatives": "local", "chunks": ROWS, "mode": "fused"},
    "DataParallel": {"towers": 1, "negatives": "local", "chunks": ROWS, "wrap": True},
    "hooks": {"towers": 1, "negatives": "local", "chunks": ROWS, "hooked": True},
}


def accumulate_and_refuse() -> dict[str, Any]:
    encoder, loss = made(1, "local", hooked=False)
    sync = GradientSync(parameters(encoder, loss), mode="overlap", **SMALL)
    cache = GradCache(encoder, loss, chunk_size=5, sync=sync)
    for step in range(STEPS):
        query, positive = batch(step)
        cache.backward(own(query), own(positive), last=step == STEPS - 1, loss_scale=1 / STEPS)
    with pytest.raises(ConfigError, match=r"pass sync=GradientSync\(encoder\)"):
        GradCache(paddle.DataParallel(encoder), loss, chunk_size=5)
    return {"gradients": gradients(encoder, loss), "num_synchronized": sync.num_synchronized}


def train_every_case() -> dict[str, Any]:
    accumulated = accumulate_and_refuse()
    return {"accumulated": accumulated, **{name: train(**case) for name, case in CASES.items()}}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What each rank found: the ranks are started once."""
    return run_ranks(train_every_case, num_ranks=2)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_one_process_with_the_joined_batch(
    case: str, results: list[dict[str, Any]]
) -> None:
    first, second = (rank[case] for rank in results)
    options = {name: CASES[case][name] for name in ("wrap", "hooked") if name in CASES[case]}
    expected = joined_batch(CASES[case]["towers"], CASES[case]["negatives"], **options)
    for step in range(STEPS):
        assert same_bits(first["gradients"][step], second["gradients"][step])
        assert relative_difference(first["gradients"][step], expected[step]) < TOLERANCE
        assert not same_bits(first["local"][step], second["local"][step]), "last=False is local"
    for rank in (first, second):
        assert rank["num_synchronized"] == STEPS, "once per step, and not with last=False"
        if CASES[case].get("mode") != "fused":
            assert rank["early"][0] == 0, "the first step learns the order"
            assert min(rank["early"][1:]) > 0


def test_accumulated_calls_are_synchronized_once(results: list[dict[str, Any]]) -> None:
    first, second = (rank["accumulated"] for rank in results)
    expected = [np.mean(each, axis=0) for each in zip(*joined_batch(1, "local"), strict=True)]
    assert same_bits(first["gradients"], second["gradients"])
    assert relative_difference(first["gradients"], expected) < TOLERANCE
    assert first["num_synchronized"] == second["num_synchronized"] == 1
