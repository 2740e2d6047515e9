"""GradCache leaves the gradients of the whole batch: bit by bit with the same chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from paddle_recompute import ContrastiveLoss, GradCache, apply_recompute
from paddle_recompute.contrastive._chunks import by_length, joined
from paddle_recompute.options import RecomputeConfig
from tests.contrastive.encoders import (
    BATCH,
    WIDTH,
    Encoder,
    criterion,
    gradients,
    make,
    one_shot,
    relative_difference,
    same_bits,
    texts,
)

TOLERANCE = 1e-5
"""A sum over the rows of a batch is rounded in another order when the rows come in chunks."""

SIZES = {"one row": 1, "divisor": 8, "uneven": 5, "whole": BATCH, "more than there is": 100}


class LearnableTemperature(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.log_scale = self.create_parameter(
            [1], default_initializer=paddle.nn.initializer.Constant(2.0)
        )

    def forward(self, query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        scores = paddle.matmul(query, positive, transpose_y=True) * self.log_scale.exp()
        return F.cross_entropy(scores, paddle.arange(len(query)))


@pytest.mark.parametrize("chunk_size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("towers", [1, 2], ids=["tied", "separate"])
@pytest.mark.parametrize("loss", ["symmetric", "learnable"])
def test_same_bits_as_one_loss_over_the_same_chunks(
    chunk_size: int, towers: int, loss: str
) -> None:
    encoders, query, positive = make(towers), texts(1), texts(2)
    criteria = {"symmetric": criterion, "learnable": LearnableTemperature()}
    trained = (encoders, criteria[loss]) if loss == "learnable" else (encoders,)
    paddle.seed(3)
    expected_loss = one_shot(encoders, criteria[loss], query, positive, chunk_size=chunk_size)
    expected, stream = gradients(*trained), paddle.rand([1]).item()

    cache = GradCache(encoders, criteria[loss], chunk_size=chunk_size)
    paddle.seed(3)
    value = cache.backward(query, positive)

    assert value.shape == [] and value.stop_gradient
    assert value.item() == expected_loss.item()
    assert same_bits(gradients(*trained), expected)
    assert paddle.rand([1]).item() == stream, "the random stream stands where a step leaves it"
    assert cache.num_chunks == 2 * -(-BATCH // chunk_size)


@pytest.mark.parametrize(
    "chunks",
    [{"chunk_size": size} for size in SIZES.values()]
    + [{"chunk_tokens": tokens} for tokens in (1, 25, 10_000)],
    ids=str,
)
@pytest.mark.parametrize("towers", [1, 2], ids=["tied", "separate"])
def test_equal_to_the_unchunked_step_without_dropout(towers: int, chunks: dict[str, int]) -> None:
    encoders, query, positive = make(towers, dropout=0.0), texts(1), texts(2)
    expected_loss = one_shot(encoders, criterion, query, positive)
    expected = gradients(encoders)
    loss = GradCache(encoders, criterion, **chunks).backward(query, positive)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert relative_difference(gradients(encoders), expected) < TOLERANCE


def test_float64() -> None:
    encoder, query, positive = make(1, dropout=0.0), texts(1), texts(2)
    encoder.to(dtype="float64")
    one_shot(encoder, criterion, query, positive)
    expected = gradients(encoder)
    GradCache(encoder, criterion, chunk_size=5).backward(query, positive)
    assert relative_difference(gradients(encoder), expected) < 1e-13


@pytest.mark.parametrize("checkpoints", [["encoder.layers.*"], ["encoder"]], ids=str)
def test_with_recompute_inside(checkpoints: list[str]) -> None:
    query, positive = texts(1), texts(2)
    plain, encoder = make(1), make(1)
    paddle.seed(3)
    one_shot(plain, criterion, query, positive, chunk_size=7)
    apply_recompute(encoder, RecomputeConfig(checkpoints=checkpoints))
    paddle.seed(3)
    GradCache(encoder, criterion, chunk_size=7).backward(query, positive)
    assert same_bits(gradients(encoder), gradients(plain))


def test_with_paddles_own_recompute_inside() -> None:
    query, positive = texts(1), texts(2)
    plain, encoder = make(1), make(1)
    paddle.seed(3)
    one_shot(plain, criterion, query, positive, chunk_size=7)
    apply_recompute(encoder, RecomputeConfig(engine="fleet"))
    paddle.seed(3)
    GradCache(encoder, criterion, chunk_size=7).backward(query, positive)
    assert same_bits(gradients(encoder), gradients(plain))


def test_chunks_by_length_are_those_of_one_loss_over_the_same_chunks() -> None:
    encoder, query, positive = make(1), texts(1), texts(2)
    paddle.seed(3)
    embeddings = []
    for ids in (query, positive):
        chunks = by_length(ids, 30, None, len(ids), "ids")
        embeddings.append(joined([encoder(chunk.of(ids)) for chunk in chunks], chunks))
    criterion(*embeddings).backward()
    expected = gradients(encoder)
    paddle.seed(3)
    GradCache(encoder, criterion, chunk_tokens=30).backward(query, positive)
    assert same_bits(gradients(encoder), expected)


@pytest.mark.parametrize("chunks", [{"chunk_size": 5}, {"chunk_tokens": 30}], ids=str)
def test_the_loss_sees_all_rows_in_the_order_of_the_caller(chunks: dict[str, int]) -> None:
    encoder, query, positive = make(1, dropout=0.0), texts(1), texts(2)
    seen: list[paddle.Tensor] = []

    def loss(*embeddings: paddle.Tensor) -> paddle.Tensor:
        seen.extend(one.detach() for one in embeddings)
        return criterion(*embeddings)

    GradCache(encoder, loss, **chunks).backward(query, positive)
    assert len(seen) == 2, "one call of the loss"
    for ids, embedding in zip((query, positive), seen, strict=True):
        np.testing.assert_allclose(embedding.numpy(), encoder(ids).numpy(), rtol=1e-4, atol=1e-6)


class TwoHeads(Encoder):
    """Returns {"pooled": ..., "ids": integers, "both": (first token, unused)}."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__(dropout)
        self.extra = paddle.nn.Linear(WIDTH, 4)
        self.unused = paddle.nn.Linear(WIDTH, 4)

    def forward(self, ids: paddle.Tensor) -> dict[str, Any]:
        pooled = super().forward(ids)
        same = self.extra(pooled)
        return {
            "pooled": pooled,
            "ids": ids[:, 0],
            "both": (same, self.unused(pooled), None),
            "same": same,
        }


def of_heads(query: dict[str, Any], positive: dict[str, Any]) -> paddle.Tensor:
    assert query["ids"].dtype == paddle.int64 and query["ids"].stop_gradient
    assert query["both"][2] is None
    return (
        criterion(query["pooled"], positive["pooled"])
        + criterion(query["both"][0], positive["same"])
        + query["ids"].astype("float32").mean()
    )


def test_more_heads_than_one() -> None:
    paddle.seed(1)
    encoder, query, positive = TwoHeads(), texts(1), texts(2)
    paddle.seed(3)
    outputs = []
    for ids in (query, positive):
        parts = [encoder(ids[first : first + 7]) for first in range(0, BATCH, 7)]
        outputs.append(
            {
                "pooled": paddle.concat([part["pooled"] for part in parts]),
                "ids": paddle.concat([part["ids"] for part in parts]),
                "both": (paddle.concat([part["both"][0] for part in parts]), None, None),
                "same": paddle.concat([part["same"] for part in parts]),
            }
        )
    expected_loss = of_heads(*outputs)
    expected_loss.backward()
    expected = gradients(encoder)
    paddle.seed(3)
    loss = GradCache(encoder, of_heads, chunk_size=7).backward(query, positive)
    found = gradients(encoder)
    assert loss.item() == expected_loss.item()
    names = [name for name, _ in encoder.named_parameters()]
    unused = [name for name, one in zip(names, found, strict=True) if one is None]
    assert unused == ["unused.weight", "unused.bias"], "as in a plain step: None, not zeros"
    used = [place for place, one in enumerate(found) if one is not None]
    difference = relative_difference([found[i] for i in used], [expected[i] for i in used])
    assert difference < TOLERANCE  # the order in which the engine adds the heads up is its own


def test_accumulated_calls_add_up() -> None:
    encoder = make(1)
    batches = [(texts(seed), texts(seed + 10)) for seed in range(3)]
    paddle.seed(3)
    for query, positive in batches:
        one_shot(encoder, criterion, query, positive, chunk_size=8, scale=1 / 3)
    expected = gradients(encoder)
    cache = GradCache(encoder, criterion, chunk_size=8)
    paddle.seed(3)
    for number, (query, positive) in enumerate(batches):
        cache.backward(query, positive, last=number == 2, loss_scale=1 / 3)
    assert relative_difference(gradients(encoder), expected) < TOLERANCE


def test_the_loss_is_returned_unscaled() -> None:
    encoder, query, positive = make(1), texts(1), texts(2)
    cache = GradCache(encoder, criterion, chunk_size=8)
    paddle.seed(3)
    loss = cache.backward(query, positive)
    plain = gradients(encoder)
    paddle.seed(3)
    scaled_loss = cache.backward(query, positive, loss_scale=paddle.full([], 1024.0))
    assert loss.item() == scaled_loss.item()
    assert same_bits([one / 1024 for one in gradients(encoder)], plain)  # a power of two is exact


def test_more_inputs_go_through_the_second_encoder_and_arguments_to_the_loss() -> None:
    encoders = make(2)
    inputs = texts(1), texts(2), texts(3, rows=11)

    def loss(query: Any, positive: Any, negatives: Any, *, factor: float) -> paddle.Tensor:
        assert [len(query), len(positive), len(negatives)] == [BATCH, BATCH, 11]
        scores = paddle.matmul(query, paddle.concat([positive, negatives]), transpose_y=True)
        return F.cross_entropy(scores * factor, paddle.arange(BATCH))

    paddle.seed(3)
    parts = [
        paddle.concat([encoders[min(i, 1)](ids[a : a + 5]) for a in range(0, len(ids), 5)])
        for i, ids in enumerate(inputs)
    ]
    loss(*parts, factor=3.0).backward()
    expected = gradients(encoders)
    paddle.seed(3)
    cache = GradCache(encoders, loss, chunk_size=5)
    cache.backward(*inputs, loss_arguments={"factor": 3.0})
    assert same_bits(gradients(encoders), expected)


def test_methods_of_one_layer_are_encoders() -> None:
    class Towers(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Encoder(), Encoder()

        def of_query(self, ids: paddle.Tensor) -> paddle.Tensor:
            return self.left(ids)

        def of_positive(self, ids: paddle.Tensor) -> paddle.Tensor:
            return self.right(ids)

    paddle.seed(1)
    model, query, positive = Towers(), texts(1), texts(2)
    paddle.seed(3)
    one_shot((model.left, model.right), criterion, query, positive, chunk_size=5)
    expected = gradients(model)
    paddle.seed(3)
    GradCache((model.of_query, model.of_positive), criterion, chunk_size=5).backward(
        query, positive
    )
    assert same_bits(gradients(model), expected)


def test_gradients_reach_a_learnt_temperature_of_a_closure() -> None:
    encoder, scale = make(1), paddle.nn.Linear(1, 1)
    criteria = ContrastiveLoss(0.5)

    def loss(query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
        return criteria(query * scale.weight.reshape([]), positive)

    query, positive = texts(1), texts(2)
    paddle.seed(3)
    one_shot(encoder, loss, query, positive, chunk_size=5)
    expected = gradients(encoder, scale)
    paddle.seed(3)
    GradCache(encoder, loss, chunk_size=5).backward(query, positive)
    assert same_bits(gradients(encoder, scale), expected)


class HalfEmbeddings(paddle.nn.Layer):
    """Its output is rounded to `dtype`, as under AMP."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.encoder = Encoder(dropout=0.0)
        self.dtype_out = dtype

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        return self.encoder(ids).astype(self.dtype_out)


@pytest.mark.parametrize("chunks", [{"chunk_size": 5}, {"chunk_tokens": 30}], ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_embeddings_in_half_precision(dtype: str, tolerance: float, chunks: dict[str, int]) -> None:
    query, positive = texts(1), texts(2)
    paddle.seed(1)
    exact = HalfEmbeddings("float32")
    one_shot(exact, criterion, query, positive)
    paddle.seed(1)
    encoder = HalfEmbeddings(dtype)
    seen: list[Any] = []

    def loss(*embeddings: paddle.Tensor) -> paddle.Tensor:
        seen.extend(one.dtype for one in embeddings)
        return criterion(*(one.astype("float32") for one in embeddings))

    GradCache(encoder, loss, **chunks).backward(query, positive)
    assert seen == [getattr(paddle, dtype)] * 2
    assert relative_difference(gradients(encoder), gradients(exact)) < tolerance


@pytest.mark.parametrize("chunks", [{}, {"chunk_size": 5}, {"chunk_size": BATCH}])
def test_evaluate_is_the_loss_alone(chunks: dict[str, Any]) -> None:
    encoder, query, positive = make(1), texts(1), texts(2)
    encoder.eval()
    cache = GradCache(encoder, criterion, **chunks)
    with watched_graph(encoder) as has_graph:
        value = cache.evaluate(query, positive)
    assert value.stop_gradient and value.item() == cache.backward(query, positive).item()
    assert has_graph == [False] * (2 if chunks != {"chunk_size": 5} else 2 * -(-BATCH // 5))


@contextlib.contextmanager
def watched_graph(encoder: paddle.nn.Layer) -> Iterator[list[bool]]:
    """Whether each output of `encoder` has a graph."""
    seen: list[bool] = []
    hook = encoder.register_forward_post_hook(lambda *call: seen.append(not call[2].stop_gradient))
    yield seen
    hook.remove()
