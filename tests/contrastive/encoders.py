"""Small encoders and batches for the tests of GradCache, and the step they are held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F

from paddle_recompute import ContrastiveLoss
from paddle_recompute.app.encoder.ernie import PADDED_SCORE

BATCH, LENGTH, WIDTH, WORDS = 24, 10, 16, 50

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
    query: Any,
    positive: Any,
    *,
    chunk_size: int | None = None,
    scale: float = 1.0,
) -> paddle.Tensor:
    """The plain step: one loss over the whole batch, encoded with a graph, in chunks or at once."""
    pair = encoders if isinstance(encoders, tuple) else (encoders, encoders)
    embeddings = []
    for encoder, ids in zip(pair, (query, positive), strict=True):
        size = chunk_size or len(ids)
        parts = [encoder(ids[first : first + size]) for first in range(0, len(ids), size)]
        embeddings.append(paddle.concat(parts) if len(parts) > 1 else parts[0])
    value = loss(*embeddings)
    (value * scale).backward()
    return value.detach()


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
