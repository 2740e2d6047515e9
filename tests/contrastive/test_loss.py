"""InfoNCE against a float64 reference, where it is ordinary and where float32 is in trouble."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
import pytest
from paddle.base import core

from paddle_recompute._paddle.amp import AmpState, amp_state, amp_state_of
from paddle_recompute.contrastive import ContrastiveLoss
from paddle_recompute.errors import ConfigError, DataError
from tests.contrastive.loss_reference import UNDERFLOW, Array, reference, tolerance, unit_rows
from tests.ranks import run_ranks


def with_gradients(
    loss: ContrastiveLoss, query: Array, positive: Array
) -> tuple[float, Array, Array]:
    tensors = [paddle.to_tensor(one, stop_gradient=False) for one in (query, positive)]
    value = loss(*tensors)
    value.backward()
    return float(value), tensors[0].grad.numpy(), tensors[1].grad.numpy()


SAME = unit_rows((12, 20))
CASES = {
    "random": (unit_rows((12, 20)), unit_rows((12, 20), seed=1)),
    "alike": (SAME, unit_rows((12, 20), seed=2) * 0.1 + SAME),
    "found, loss near zero": (np.eye(8, dtype=np.float32), np.eye(8, dtype=np.float32)),
    "exactly wrong": (SAME, -SAME),
    "somebody else's": (SAME, np.roll(SAME, 1, axis=0)),
    "all the same vector": (np.tile(SAME[:1], (12, 1)), np.tile(SAME[:1], (12, 1))),
    "two pairs": (unit_rows((2, 3)), unit_rows((2, 3), seed=1)),
}


TILES = [None, 1, 4, 5, 12, 100]  # of 12 pairs: one, a divisor, uneven, all, more than all


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.05, 0.02, 0.001])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_reference(
    case: str, temperature: float, symmetric: bool, tile: int | None
) -> None:
    query, positive = CASES[case]
    expected = reference(query, positive, temperature, symmetric)
    found = with_gradients(ContrastiveLoss(temperature, symmetric, tile=tile), query, positive)
    assert found[0] == pytest.approx(expected.loss, rel=tolerance(temperature), abs=UNDERFLOW)
    for got, want in zip(found[1:], (expected.query, expected.positive), strict=True):
        atol = tolerance(temperature) * expected.size + UNDERFLOW
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


@pytest.mark.parametrize("tile", [None, 3])
def test_small_loss_keeps_what_cross_entropy_rounds_to_zero(tile: int | None) -> None:
    vectors, temperature = np.eye(8, dtype=np.float32), 0.02
    criterion = ContrastiveLoss(temperature, tile=tile)
    loss, query_gradient, _ = with_gradients(criterion, vectors, vectors)
    assert loss == pytest.approx(7 * math.exp(-50), rel=1e-4)
    own, other = query_gradient[0, 0], query_gradient[0, 1]
    assert other > 0
    assert own == pytest.approx(-7 * other, rel=1e-4)
    scores = paddle.to_tensor(vectors @ vectors.T / temperature)
    assert float(F.cross_entropy(scores, paddle.arange(8))) == 0.0


def test_ordinary_loss_is_paddles_cross_entropy() -> None:
    query, positive = CASES["random"]
    scores = paddle.to_tensor(query @ positive.T / 0.05)
    expected = F.cross_entropy(scores, paddle.arange(12))
    loss = ContrastiveLoss(0.05, symmetric=False)
    got = loss(paddle.to_tensor(query), paddle.to_tensor(positive))
    assert float(got) == pytest.approx(float(expected), rel=tolerance(0.05))


def test_symmetric_loss_does_not_mind_which_side_asks() -> None:
    query, positive = (paddle.to_tensor(one) for one in CASES["random"])
    both, one = ContrastiveLoss(), ContrastiveLoss(symmetric=False)
    assert float(both(query, positive)) == pytest.approx(float(both(positive, query)), rel=1e-6)
    assert float(one(query, positive)) != pytest.approx(float(one(positive, query)), rel=1e-3)
    mean = (float(one(query, positive)) + float(one(positive, query))) / 2
    assert float(both(query, positive)) == pytest.approx(mean, rel=1e-6)


def test_knowing_nothing_costs_the_logarithm_of_the_batch() -> None:
    for batch in (2, 7, 64):
        vectors = paddle.ones([batch, 3])
        assert float(ContrastiveLoss()(vectors, vectors)) == pytest.approx(math.log(batch))


@pytest.mark.parametrize("tile", [None, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_result_is_a_scalar_of_float32_at_least(dtype: str, tile: int | None) -> None:
    query, positive = (paddle.to_tensor(one).astype(dtype) for one in CASES["random"])
    query.stop_gradient = False
    loss = ContrastiveLoss(tile=tile)(query, positive)
    loss.backward()
    assert query.grad.dtype == query.dtype
    assert list(loss.shape) == []
    assert loss.dtype == (paddle.float64 if dtype == "float64" else paddle.float32)


@pytest.mark.parametrize("tile", [None, 12])
def test_autocast_does_not_reach_the_scores(
    tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked at the matrix product: on the CPU nothing is cast, whatever the AMP state says."""
    query, positive = (paddle.to_tensor(one, stop_gradient=False) for one in CASES["random"])
    levels, matmul = [], paddle.matmul

    def recorded(*args: Any, **kwargs: Any) -> Any:
        levels.append(amp_state().level)
        return matmul(*args, **kwargs)

    monkeypatch.setattr(paddle, "matmul", recorded)
    off, amp = core.AmpLevel.O0, core.AmpLevel.O1
    with amp_state_of(AmpState(amp, "bfloat16", ({"matmul"}, set()), False)):
        ContrastiveLoss(tile=tile)(query, positive).backward()
        assert amp_state().level == amp
    # In tiles: the scores, the scores again, and the two products of the gradients.
    assert levels == [off] * (1 if tile is None else 4)


def local_loss_gradient(num_pairs: int, dim: int) -> Array:
    """The gradient of a shared weight by the local loss, averaged over the ranks."""
    rank, per_rank = dist.get_rank(), num_pairs // dist.get_world_size()
    rows = slice(rank * per_rank, (rank + 1) * per_rank)
    weight = paddle.to_tensor(unit_rows((dim, dim), seed=5), stop_gradient=False)
    query, positive = (
        paddle.to_tensor(unit_rows((num_pairs, dim), seed=seed)[rows]) for seed in (3, 4)
    )
    criterion = ContrastiveLoss(negatives="local")
    criterion(paddle.matmul(query, weight), positive).backward()
    gradient = weight.grad
    dist.all_reduce(gradient)
    return np.asarray((gradient / dist.get_world_size()).numpy())


def test_averaged_gradient_is_that_of_the_mean_of_the_local_losses() -> None:
    """Of the same scale as one loss, and not the gradient of one loss over all pairs."""
    num_pairs, dim = 8, 6
    gradients = run_ranks(local_loss_gradient, 2, num_pairs=num_pairs, dim=dim)
    query, positive = (unit_rows((num_pairs, dim), seed=seed) for seed in (3, 4))
    weight = unit_rows((dim, dim), seed=5)

    def expected(batch: int) -> Array:
        parts = [slice(first, first + batch) for first in range(0, num_pairs, batch)]
        each = [
            query[rows].T @ reference(query[rows] @ weight, positive[rows]).query for rows in parts
        ]
        return np.mean(each, axis=0)

    local, all_pairs = expected(num_pairs // 2), expected(num_pairs)
    for gradient in gradients:
        np.testing.assert_allclose(gradient, local, rtol=0, atol=2e-5 * np.abs(local).max())
        assert np.abs(gradient - all_pairs).max() > 0.1 * np.abs(local).max()


@pytest.mark.parametrize("temperature", [0, -0.05, math.nan, math.inf])
def test_temperature_must_be_a_positive_number(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"temperature: received .*; allowed is a number greater"):
        ContrastiveLoss(temperature)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negatives": "all"}, "negatives: received 'all'; allowed are 'global' and 'local'"),
        ({"label_smoothing": 1.0}, "label_smoothing: received 1.0; allowed is 0 to below 1"),
        ({"label_smoothing": -0.1}, "label_smoothing: received -0.1"),
        ({"tile": 0}, "tile: received 0; allowed is None or at least 1"),
        ({"negatives": "local", "group": "a group"}, "group has no effect with negatives='local'"),
        (
            {"temperature": 0.009, "learnable_temperature": True},
            "temperature: received 0.009; with learnable_temperature allowed is at least 0.01",
        ),
    ],
)
def test_options_that_do_not_exist_or_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ContrastiveLoss(**options)


@pytest.mark.parametrize(
    ("query", "positive"), [([4, 3], [5, 3]), ([4, 3], [4, 2]), ([4], [4]), ([2, 4, 3], [2, 4, 3])]
)
def test_shapes_must_be_those_of_pairs(query: list[int], positive: list[int]) -> None:
    with pytest.raises(DataError, match=r"received queries of shape .* allowed is the same"):
        ContrastiveLoss()(paddle.ones(query), paddle.ones(positive))


def test_one_pair_alone_has_no_negatives() -> None:
    with pytest.raises(DataError, match="received a batch of 1; a pair needs at least one other"):
        ContrastiveLoss()(paddle.ones([1, 3]), paddle.ones([1, 3]))
