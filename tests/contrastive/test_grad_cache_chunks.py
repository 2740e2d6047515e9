"""No chunk, and no row of one, speaks for the others."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_recompute import GradCache
from paddle_recompute.contrastive import _recomputation_check
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import is_recomputing
from tests.contrastive.encoders import (
    CHUNKS,
    SIZE,
    both,
    criterion,
    gradients,
    make,
    same_bits,
    texts,
)


@pytest.mark.parametrize("num_bytes", [0, _recomputation_check.COMPARED_BYTES])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_chunk_that_is_not_repeated_makes_the_gradient_nan(
    chunk: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is, and however many are compared at once; the host is not told meanwhile."""
    monkeypatch.setattr(_recomputation_check, "COMPARED_BYTES", num_bytes)
    encoder, query, positive = make(1), texts(1), texts(2)
    first = query[chunk * SIZE].tolist()
    wrong = False

    def changing(ids: paddle.Tensor) -> paddle.Tensor:
        is_changed = wrong and is_recomputing() and ids[0].tolist() == first
        return encoder(ids) * (2.0 if is_changed else 1.0)

    cache = GradCache(changing, criterion, chunk_size=SIZE)
    cache.backward(query, positive)
    assert np.isfinite(gradients(encoder)[0]).all()
    wrong = True
    cache.backward(query, positive)
    assert np.isnan(gradients(encoder)[0]).any()
    with pytest.raises(RecomputeError, match="encoder of query returned other values"):
        cache.check_repetition()


def test_where_no_gradient_can_be_made_nan_the_error_comes_at_once() -> None:
    encoder, query = make(1), texts(1)
    first, last = query[0].tolist(), query[(CHUNKS - 1) * SIZE].tolist()
    wrong = False

    def changing(ids: paddle.Tensor) -> paddle.Tensor:
        rows = ids[0].tolist()
        output = encoder(ids) * (2.0 if wrong and is_recomputing() and rows == first else 1.0)
        return output.detach() if rows == last else output

    cache = GradCache(changing, criterion, chunk_size=SIZE)
    cache.backward(query, query)
    wrong = True
    with pytest.raises(RecomputeError, match=r"encoder of (query|positive) returned other values"):
        cache.backward(query, query)


def test_a_second_forward_of_another_shape_is_told() -> None:
    encoder = make(1)

    def changing(ids: paddle.Tensor) -> paddle.Tensor:
        output = encoder(ids)
        return output[:, :1] if is_recomputing() else output

    with pytest.raises(RecomputeError, match=r"output of shape \[7, 1\] in the second forward"):
        GradCache(changing, criterion, chunk_size=SIZE).backward(texts(1), texts(2))


def test_numbers_that_are_not_finite_twice_are_repeated() -> None:
    encoder = make(1)

    def overflowing(ids: paddle.Tensor) -> paddle.Tensor:
        return encoder(ids) / paddle.to_tensor([0.0, float("nan"), *[1.0] * 14])

    loss = GradCache(overflowing, criterion, chunk_size=SIZE).backward(texts(1), texts(2))
    assert np.isnan(loss.item())


def test_a_loss_may_write_into_the_embeddings() -> None:
    def writing(query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        return criterion(query.scale_(3.0), positive)

    assert same_bits(*both(make(1), loss=writing))
