"""No chunk, and no row of one, speaks for the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import GradCache
from paddle_recompute.contrastive import _repetition
from paddle_recompute.errors import DataError, RecomputeError
from paddle_recompute.recompute import is_recomputing
from tests.contrastive.encoders import (
    BATCH,
    Encoder,
    criterion,
    gradients,
    make,
    one_shot,
    same_bits,
    texts,
)

SIZE = 7
CHUNKS = -(-BATCH // SIZE)


class DetachedIn(Encoder):
    """Without a gradient for the chunks that begin with certain rows."""

    def __init__(self, first_rows: list[list[int]]) -> None:
        super().__init__()
        self.first_rows = first_rows

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        output = super().forward(ids)
        return output.detach() if ids[0].tolist() in self.first_rows else output


@pytest.mark.parametrize("detached", [[0], [1], [CHUNKS - 1], [0, 1], list(range(1, CHUNKS))])
def test_a_detached_chunk_takes_no_gradient_from_the_others(detached: list[int]) -> None:
    query, positive = texts(1), texts(2)
    rows = [query[number * SIZE].tolist() for number in detached]
    found = []
    for step in (one_shot, None):
        paddle.seed(1)
        encoder = DetachedIn(rows)
        paddle.seed(3)
        if step is None:
            GradCache(encoder, criterion, chunk_size=SIZE).backward(query, positive)
        else:
            step(encoder, criterion, query, positive, chunk_size=SIZE)
        found.append(gradients(encoder))
    assert same_bits(*found)


def test_each_output_is_trained_where_any_chunk_trains_it() -> None:
    encoder, query = make(1), texts(1)
    first = query[0].tolist()

    def outputs(ids: paddle.Tensor) -> Any:
        output = encoder(ids)
        return output, (output * 2).detach() if ids[0].tolist() == first else output * 2

    def total(one: Any, other: Any) -> paddle.Tensor:
        return criterion(one[1], other[1])

    paddle.seed(3)
    parts = [[outputs(query[i : i + SIZE])[1] for i in range(0, BATCH, SIZE)] for _ in range(2)]
    criterion(*(paddle.concat(part) for part in parts)).backward()
    expected = gradients(encoder)
    paddle.seed(3)
    GradCache(outputs, total, chunk_size=SIZE).backward(query, query)
    assert same_bits(gradients(encoder), expected)


@pytest.mark.parametrize(
    "constant", [lambda ids: len(ids), lambda ids: [0] * len(ids), lambda ids: str(len(ids))]
)
def test_what_is_no_tensor_and_differs_between_chunks_is_refused(constant: Any) -> None:
    encoder = make(1)
    cache = GradCache(
        lambda ids: (encoder(ids), constant(ids)), lambda q, p: criterion(q[0], p[0]), chunk_size=7
    )
    with pytest.raises(DataError, match=r"returned output\[1\].* for its first chunk and"):
        cache.backward(texts(1), texts(2))


@pytest.mark.parametrize("row", range(SIZE))
@pytest.mark.parametrize("chunk", [0, CHUNKS - 2])
@pytest.mark.parametrize("spoilt", [0.5, float("nan"), float("inf")])
def test_every_row_of_a_chunk_must_be_repeated(row: int, chunk: int, spoilt: float) -> None:
    encoder, query, positive = make(1), texts(1), texts(2)
    first = query[chunk * SIZE].tolist()

    def changing(ids: paddle.Tensor) -> paddle.Tensor:
        output = encoder(ids)
        if is_recomputing() and ids[0].tolist() == first:
            added = np.zeros(output.shape, "float32")
            added[row, -1] = spoilt
            output = output + paddle.to_tensor(added)
        return output

    with pytest.raises(RecomputeError, match="encoder of query returned other values"):
        GradCache(changing, criterion, chunk_size=SIZE).backward(query, positive)


@pytest.mark.parametrize("num_bytes", [0, _repetition.COMPARED_BYTES])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_chunk_that_is_not_repeated_makes_the_gradient_nan(
    chunk: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is, and however many are compared at once; the host is not told meanwhile."""
    monkeypatch.setattr(_repetition, "COMPARED_BYTES", num_bytes)
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
    encoder, query, positive = make(1), texts(1), texts(2)

    def writing(query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        return criterion(query.scale_(3.0), positive)

    paddle.seed(3)
    one_shot(encoder, writing, query, positive, chunk_size=SIZE)
    expected = gradients(encoder)
    paddle.seed(3)
    GradCache(encoder, writing, chunk_size=SIZE).backward(query, positive)
    assert same_bits(gradients(encoder), expected)
