"""Which tensors `chunk_tokens` reads and cuts: by their names, never by the order of keys."""

from __future__ import annotations

import itertools
from dataclasses import make_dataclass
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import GradCache
from paddle_recompute.contrastive._chunks import by_length, num_rows_of
from paddle_recompute.contrastive._texts import lengths_of, texts_of
from paddle_recompute.errors import ConfigError, DataError
from tests.contrastive.encoders import (
    criterion,
    gradients,
    relative_difference,
    texts,
)

IDS = np.array([[5, 6, 7, 0], [5, 0, 0, 0], [5, 6, 0, 0]])
MASK = (IDS != 0).astype("int64")
FEATURES = np.full([3, 4], 9)
FIRST = np.array([[1, 0, 0, 0]] * 3)


def lengths(batch: Any) -> np.ndarray:
    return lengths_of(texts_of(batch, "query"), None, num_rows_of(batch, "query"), "query")


def cut(batch: Any, columns: int = 1) -> Any:
    """Row 1 as a chunk of its own."""
    chunks = by_length(batch, columns, None, num_rows_of(batch, "query"), "query")
    return next(chunk for chunk in chunks if list(chunk.rows) == [1]).of(batch)


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        ({"src_mask": FIRST, "input_ids": IDS}, [3, 1, 2]),
        # Of the same width by chance, or not: nothing in it may be lost.
        ({"features": FEATURES, "input_ids": IDS, "attention_mask": MASK}, [4, 4, 4]),
        ({"one": IDS, "other": FIRST}, [3, 1, 2]),
        ({"a": {"input_ids": IDS, "mask": FIRST}, "b": {"input_ids": IDS}}, [3, 1, 2]),
        ({"ids": MASK, "scores": FEATURES.astype("float32")}, [3, 1, 2]),
        ({"ids": IDS + 1, "mask": np.array([[1, 0, 1, 0], [0] * 4, [1] * 4])}, [3, 0, 4]),
    ],
)
def test_lengths_whatever_the_order(batch: Any, wanted: list[int]) -> None:
    """Of names that are common: tests/fuzz/test_grad_cache.py."""
    for order in itertools.permutations(batch):
        given = {key: batch[key] for key in order}
        assert lengths(given).tolist() == wanted, order
        kind = make_dataclass("Batch", list(given))
        assert lengths(kind(**given)).tolist() == wanted, order


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": IDS, "b": IDS[:, :2]}, r"query\['a'\] \[3, 4\], query\['b'\] \[3, 2\]"),
        ((IDS, IDS[:, :2]), r"query\[0\] \[3, 4\], query\[1\] \[3, 2\]"),
        (
            {"mask": MASK[:, :2], "input_ids": IDS},
            r"query\['mask'\] \[3, 2\], query\['input_ids'\] \[3, 4\]",
        ),
        (
            {"x": {"input_ids": IDS}, "y": {"input_ids": IDS[:, :3]}},
            r"query\['x'\]\['input_ids'\] \[3, 4\], query\['y'\]\['input_ids'\] \[3, 3\]",
        ),
    ],
)
def test_what_is_not_clear_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        texts_of(batch, "query")


@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "tensors"])
@pytest.mark.parametrize(
    "mask", [(MASK - 1) * 1e4, (MASK - 1) * 1000, np.zeros(IDS.shape)], ids=["float", "int", "0"]
)
def test_a_mask_that_is_added_to_scores_is_refused(mask: Any, tensors: bool) -> None:
    dtype = "int64" if mask.dtype.kind == "i" else "float32"
    batch = {"input_ids": IDS, "attention_mask": mask.astype(dtype)}
    if tensors:
        batch = {name: paddle.to_tensor(one) for name, one in batch.items()}
    with pytest.raises(DataError, match=r"query\['attention_mask'\] is not a mask of 1 for tokens"):
        lengths(batch)


# ---------------------------------------------------------------- masks and outputs of more axes

LONG = np.array([[5, 6, 7, 8], [5, 0, 0, 0], [5, 6, 0, 0]])


@pytest.mark.parametrize(
    ("shape", "cut_shape"),
    [
        ([3, 4], [1, 1]),
        ([3, 1, 4], [1, 1, 1]),
        ([3, 4, 4], [1, 1, 1]),
        ([3, 1, 1, 4], [1, 1, 1, 1]),
        ([3, 1, 4, 4], [1, 1, 1, 1]),
        ([3, 2, 4, 4], [1, 2, 1, 1]),
        ([3, 4, 4, 4], [1, 4, 1, 1]),  # four heads
    ],
)
def test_a_mask_of_any_rank_is_cut(shape: list[int], cut_shape: list[int]) -> None:
    mask = np.arange(1, 1 + np.prod(shape)).reshape(shape).astype("float32")
    batch: dict[str, Any] = {"input_ids": LONG, "attention_mask": mask}
    if len(shape) == 2:
        batch["attention_mask"] = (LONG != 0).astype("float32")
    found = cut({name: paddle.to_tensor(array) for name, array in batch.items()})
    assert found["input_ids"].shape == [1, 1]
    assert found["attention_mask"].shape == cut_shape
    kept = mask[1:2][tuple(slice(size) for size in cut_shape)]
    assert len(shape) == 2 or (found["attention_mask"].numpy() == kept).all()


def test_without_a_name_only_a_row_is_a_mask() -> None:
    image = np.ones([3, 2, 4, 4], "float32")
    found = cut((LONG, np.ones([3, 1, 1, 4], "float32"), image))
    assert [part.shape for part in found] == [[1, 1], [1, 1, 1, 1], [1, 2, 4, 4]]
    assert cut({"input_ids": LONG, "pixels": image[:, :1]})["pixels"].shape == [1, 1, 4, 4]
    with pytest.raises(ConfigError, match=r"query\[1\] has shape \[3, 1, 4, 4\] and no name"):
        cut((LONG, image[:, :1]))


class WithHidden(paddle.nn.Layer):
    """Returns the hidden states, too, as models of other libraries do; takes a mask of 4 axes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = paddle.nn.Embedding(50, 8), paddle.nn.Linear(8, 8)

    def forward(self, ids: paddle.Tensor, mask: paddle.Tensor | None = None) -> Any:
        keep = (ids != 0 if mask is None else mask[:, 0, 0]).astype("float32").unsqueeze(2)
        hidden = self.layer(self.words(ids)) * keep
        scores = paddle.matmul(hidden, hidden, transpose_y=True)
        return {"hidden": hidden, "scores": scores, "pooled": hidden.sum(axis=1) / keep.sum(axis=1)}


@pytest.mark.parametrize("tokens", [8, 20])
@pytest.mark.parametrize("with_mask", [False, True])
def test_an_encoder_that_returns_hidden_states(tokens: int, with_mask: bool) -> None:
    def loss(query: Any, positive: Any) -> paddle.Tensor:
        value = criterion(query["pooled"], positive["pooled"])
        value = value + query["hidden"].tanh().sum(axis=[1, 2]).mean()
        return value + positive["scores"].tanh().sum(axis=[1, 2]).mean()

    pairs = [{"ids": one} for one in (texts(3), texts(4))]
    if with_mask:
        for one in pairs:
            one["mask"] = (one["ids"] != 0).astype("float32").unsqueeze([1, 2])
    encoder = WithHidden()
    plain = loss(*(encoder(**one) for one in pairs))
    plain.backward()
    expected = gradients(encoder)
    value = GradCache(encoder, loss, chunk_tokens=tokens).backward(*pairs)
    assert value.item() == pytest.approx(plain.item(), rel=1e-5)
    # The chunks are added up in another order.
    assert relative_difference(gradients(encoder), expected) < 2e-5


def test_an_output_of_another_length_is_refused() -> None:
    def encode(ids: paddle.Tensor) -> paddle.Tensor:
        return paddle.ones([ids.shape[0], 2 * ids.shape[1]]) * ids.astype("float32").sum()

    with pytest.raises(DataError, match=r"has shape \[\d+, \d+\] for one chunk .* vector per row"):
        GradCache(encode, criterion, chunk_tokens=20).backward(texts(3), texts(4))
