"""The global loss on two gloo ranks is that of one process with the joined batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute.contrastive import ContrastiveLoss
from paddle_recompute.errors import DataError, SyncError
from paddle_recompute.grad_sync import GradientSync
from tests.contrastive.loss_reference import Array
from tests.contrastive.products import recorded_products
from tests.ranks import run_ranks

INPUT, DIM, HARD = 9, 6, 2
PAIRS = [(4, 4), (7, 2), (1, 5)]  # of rank 0 and rank 1, step by step

OPTIONS: list[dict[str, Any]] = [
    {},
    {"tile": 3},
    {"symmetric": False, "tile": 100},
    {"symmetric": False, "hard": True, "label_smoothing": 0.1},
    {"hard": True, "mask_false_negatives": True, "label_smoothing": 0.1},
    {"hard": True, "mask_false_negatives": True, "label_smoothing": 0.1, "tile": 2},
    {"hard": True, "mask_false_negatives": True, "symmetric": False, "tile": 2},
    {"hard": True, "normalize": True, "matryoshka_dims": [2, 4, DIM]},
    {"symmetric": False, "normalize": True, "matryoshka_dims": [2, 4, DIM], "tile": 3},
    {"positives": "mask", "hard": True, "mask_false_negatives": True, "tile": 2},
    {"positives": "mask", "symmetric": False},
    {"positives": "sum", "hard": True, "label_smoothing": 0.1},
]

# Computed in float64, where only the order of the sums differs; the learned temperature is float32.
DOUBLE, SINGLE = 1e-12, 1e-6


class Encoder(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        paddle.seed(1)
        layers = [paddle.nn.Linear(INPUT, INPUT), paddle.nn.Tanh(), paddle.nn.Linear(INPUT, DIM)]
        self.layers = paddle.nn.Sequential(*layers)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.functional.normalize(self.layers(x), axis=-1)


def inputs(step: int, ranks: list[int]) -> list[Array]:
    """Queries, positives, hard negatives and the ids of both, of these ranks' pairs, joined."""
    parts = []
    for rank in ranks:
        random, pairs = np.random.default_rng([step, rank]), PAIRS[step][rank]
        query = random.normal(size=(pairs, INPUT))
        positive = query + random.normal(size=(pairs, INPUT))
        hard = random.normal(size=(pairs, HARD, INPUT))
        ids = random.integers(0, 6, (pairs, HARD + 1))  # few: many are equal, across ranks too
        parts.append([query, positive, hard, ids[:, 0], ids[:, 1:]])
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def loss_of(encoder: Encoder, loss: ContrastiveLoss, arrays: list[Array], hard: bool) -> Any:
    query, positive, negatives, *ids = (paddle.to_tensor(one) for one in arrays)
    vectors = [encoder(query), encoder(positive)]
    if hard:
        vectors.append(encoder(negatives))
    names = ("positive_ids", "negative_ids")[: 1 + hard]
    given = dict(zip(names, ids[: 1 + hard], strict=True)) if loss.mask_false_negatives else {}
    if loss.positives != "one":
        given["query_ids"] = (ids[0] + ids[1][:, 0]) % 4
    return loss(*vectors, **given)


def steps(options: dict[str, Any], ranks: list[int], sync_mode: str) -> list[Any]:
    """Loss and gradients of every step; the loss is this process's, the gradients averaged."""
    paddle.set_default_dtype("float64")
    encoder = Encoder()
    options = dict(options)
    hard = options.pop("hard", False)
    loss = ContrastiveLoss(0.1, learnable_temperature=True, **options)
    trained = [*encoder.parameters(), *loss.parameters()]
    sync = GradientSync(trained, mode=sync_mode, bucket_bytes=300, first_bucket_bytes=300)
    found = []
    for step in range(len(PAIRS)):
        with sync.last_backward():
            value = loss_of(encoder, loss, inputs(step, ranks), hard)
            value.backward()
        found.append((float(value), [parameter.grad.numpy() for parameter in trained]))
        for parameter in trained:
            parameter.clear_gradient()
    return found


def all_options() -> list[Any]:
    return [steps(options, [dist.get_rank()], "overlap") for options in OPTIONS]


def test_two_ranks_have_the_gradients_of_one_process_with_the_joined_batch() -> None:
    results = run_ranks(all_options, 2)
    try:
        for number, options in enumerate(OPTIONS):
            joined = steps(options, [0, 1], "auto")
            for step, (loss, gradients) in enumerate(joined):
                each = [found[number][step] for found in results]
                assert np.mean([value for value, _ in each]) == pytest.approx(loss, rel=DOUBLE)
                for _, averaged in each:
                    assert len(averaged) == len(gradients) == 5
                    for got, want in zip(averaged, gradients, strict=True):
                        bound = DOUBLE if want.dtype == np.float64 else SINGLE
                        atol = bound * max(np.abs(want).max(), 0.01)
                        np.testing.assert_allclose(
                            got, want, rtol=0, atol=atol, err_msg=f"{options}, step {step}"
                        )
                        assert np.abs(want).max() > 1e-4
    finally:
        paddle.set_default_dtype("float32")


def what_a_rank_computes_and_refuses() -> None:
    rank = dist.get_rank()
    vectors = paddle.randn([5 - rank, 3]), paddle.randn([5 - rank, 3])
    with recorded_products() as products:
        ContrastiveLoss()(*vectors)
    assert products == [(5 - rank, 9), (5 - rank, 9)]  # both directions

    with pytest.raises(DataError, match="the ranks have 0, 3 pairs; give every rank at least one"):
        ContrastiveLoss()(paddle.ones([3 * rank, 3]), paddle.ones([3 * rank, 3]))
    with pytest.raises(SyncError, match=rf"cannot gather: rank {rank} has \[rows, 3\]"):
        ContrastiveLoss()(*vectors, *([paddle.ones([5, 1, 3])] if rank == 0 else []))
    own = paddle.ones([1, 3]), paddle.zeros([1, 3])
    assert float(ContrastiveLoss()(*own)) > 0  # one pair on each of two ranks is enough
    with pytest.raises(DataError, match="received a batch of 1"):
        ContrastiveLoss(negatives="local")(*own)


def test_rank_computes_the_rows_of_its_own_pairs_and_is_told_what_does_not_fit() -> None:
    run_ranks(what_a_rank_computes_and_refuses, 2)
