"""Small encoders and batches for the tests of GradCache, and the step they are held to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from paddle_recompute import ContrastiveLoss, GradCache

BATCH, LENGTH, WIDTH, WORDS = 24, 10, 16, 50
SIZE = 7
PADDED_SCORE = -1e4  # finite: a softmax over -inf alone is NaN
CHUNKS = -(-BATCH // SIZE)

Gradients = list[Any]


class Encoder(paddle.nn.Layer):
    """Two Transformer blocks over word embeddings; the mean of the tokens that are no padding."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = paddle.nn.Embedding(WORDS, WIDTH, padding_idx=0)
        block = paddle.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=dropout)
        self.encoder = paddle.nn.TransformerEncoder(block, 2)
        self.num_forwards = 0

    def forward(self, ids: paddle.Tensor, mask: paddle.Tensor | None = None) -> paddle.Tensor:
        self.num_forwards += 1
        keep = (ids != 0 if mask is None else mask).astype(self.words.weight.dtype)
        added = ((1.0 - keep) * PADDED_SCORE).unsqueeze([1, 2])
        hidden = self.encoder(self.words(ids), added)
        return (hidden * keep.unsqueeze(2)).sum(axis=1) / keep.sum(axis=1, keepdim=True)


def make(number: int, dropout: float = 0.1, **options: Any) -> Any:
    """One encoder (tied), or a pair, always with the same weights."""
    paddle.seed(1)
    encoders = tuple(Encoder(dropout, **options) for _ in range(number))
    return encoders if number == 2 else encoders[0]


def texts(seed: int, rows: int = BATCH, length: int = LENGTH) -> paddle.Tensor:
    """``[rows, length]`` ids, of 1 to `length` tokens, one of them the longest; 0 behind."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, WORDS, (rows, length))
    lengths = rng.integers(1, length + 1, rows)
    lengths[rng.integers(rows)] = length
    ids[np.arange(length) >= lengths[:, None]] = 0
    return paddle.to_tensor(ids)


def criterion(query: paddle.Tensor, positive: paddle.Tensor) -> paddle.Tensor:
    return ContrastiveLoss(0.1)(F.normalize(query, axis=-1), F.normalize(positive, axis=-1))


def one_shot(
    encoders: Any,
    loss: Callable[..., paddle.Tensor],
    *inputs: Any,
    chunk_size: int | None = None,
    scale: float = 1.0,
) -> paddle.Tensor:
    """The plain step: one loss over the whole batch, encoded with a graph, in chunks or at once."""
    pair = encoders if isinstance(encoders, tuple) else (encoders, encoders)
    embeddings = []
    for place, rows in enumerate(inputs):
        size = chunk_size or len(rows)
        starts = range(0, len(rows), size)
        embeddings.append(
            concat([pair[min(place, 1)](rows[first : first + size]) for first in starts])
        )
    value = loss(*embeddings)
    (value * scale).backward()
    return value.detach()


def concat(parts: list[Any]) -> Any:
    """The outputs of all chunks as one: tensors joined, in dicts and tuples too."""
    if isinstance(parts[0], dict):
        return {key: concat([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(concat(list(each)) for each in zip(*parts, strict=True))
    if len(parts) == 1 or not isinstance(parts[0], paddle.Tensor):
        return parts[0]
    return paddle.concat(parts)


def step(
    is_cached: bool,
    encoders: Any,
    loss: Callable[..., paddle.Tensor] = criterion,
    inputs: Sequence[Any] | None = None,
    chunk_size: int | None = SIZE,
) -> paddle.Tensor:
    """A step of GradCache, or the plain one over the same chunks, from the same random numbers."""
    inputs = inputs or (texts(1), texts(2))
    paddle.seed(3)
    np.random.seed(3)
    random.seed(3)
    if is_cached:
        return GradCache(encoders, loss, chunk_size=chunk_size).backward(*inputs)
    return one_shot(encoders, loss, *inputs, chunk_size=chunk_size)


def both(encoders: Any, *layers: Any, **options: Any) -> list[Gradients]:
    """The gradients of the plain step and those of GradCache; `layers`: other than the encoders."""
    found = []
    for is_cached in (False, True):
        step(is_cached, encoders, **options)
        found.append(gradients(*(layers or (encoders,))))
    return found


def parameters(*layers: Any) -> list[paddle.Tensor]:
    flat = [one for layer in layers for one in (layer if isinstance(layer, tuple) else (layer,))]
    return [parameter for layer in flat for parameter in layer.parameters()]


def gradients(*layers: Any) -> Gradients:
    """The gradients of all parameters, which are cleared; None where there is none."""
    found = []
    for parameter in parameters(*layers):
        found.append(None if parameter.grad is None else parameter.grad.numpy().copy())
        parameter.clear_gradient(False)
    return found


def relative_difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    """The largest difference of any gradient, against the largest gradient of all."""
    assert len(one) == len(other) > 0
    assert all(a is not None and b is not None for a, b in zip(one, other, strict=True))
    largest = max(float(np.abs(b).max()) for b in other)
    assert largest > 1e-3
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True)) / largest


def same_bits(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether all gradients are there and equal bit by bit."""
    assert len(one) == len(other) > 0
    assert any(b is not None and np.abs(b).max() > 1e-3 for b in other)
    return all(
        (a is None) == (b is None) and (a is None or np.array_equal(a, b))
        for a, b in zip(one, other, strict=True)
    )
