"""InfoNCE against a float64 reference, where it is ordinary and where float32 is in trouble."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle.base import core

from paddle_recompute._paddle.amp import AmpState, amp_state, amp_state_of
from paddle_recompute.contrastive import ContrastiveLoss
from paddle_recompute.errors import ConfigError, DataError
from tests.contrastive.loss_reference import UNDERFLOW, Array, reference, tolerance, unit_rows


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature: received 0; allowed is a number greater"),
        ({"temperature": math.nan}, "temperature: received nan"),
        ({"temperature": math.inf}, "temperature: received inf"),
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
    ids=str,
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
