"""The contrastive loss and its gradients in float64 NumPy, row by row, as the formulas read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Expected:
    """A loss and its gradients.

    `size` is that of the gradients: of the largest sum, were all of its terms positive. An error is
    judged against it, as the terms may cancel to 0.
    """

    loss: float
    query: Array
    positive: Array
    negatives: Array
    logit_scale: float
    size: float


def reference(
    query: Array,
    positive: Array,
    temperature: float = 0.05,
    symmetric: bool = True,
    *,
    negatives: Array | None = None,
    ids: Array | None = None,
    negative_ids: Array | None = None,
    label_smoothing: float = 0.0,
) -> Expected:
    """Of ``[pairs, dim]``, ``[pairs, dim]`` and ``[pairs, n, dim]``; ids like the first axes."""
    pairs, dim = query.shape
    query, positive = query.astype(np.float64), positive.astype(np.float64)
    more = np.zeros((0, dim)) if negatives is None else negatives.reshape(-1, dim).astype("f8")
    candidates = np.concatenate([positive, more])
    scores = query @ candidates.T / temperature
    names = np.arange(pairs) if ids is None else ids
    if negative_ids is None:
        others = np.zeros((pairs, len(more)), bool)
    else:
        others = names[:, None] == negative_ids.reshape(1, -1)
    equal = names[:, None] == names[None, :]
    loss, by_score = one_direction(scores, np.concatenate([equal, others], 1), label_smoothing)
    if symmetric:
        back_loss, back = one_direction(scores[:, :pairs].T, equal.T, label_smoothing)
        loss, by_score = (loss + back_loss) / 2, by_score / 2
        by_score[:, :pairs] += back.T / 2
    by_candidate = by_score.T @ query / temperature
    sizes = np.abs(by_score) @ np.abs(candidates), np.abs(by_score).T @ np.abs(query)
    return Expected(
        loss,
        by_score @ candidates / temperature,
        by_candidate[:pairs],
        by_candidate[pairs:].reshape(pairs, -1, dim),
        float((by_score * scores).sum()),
        float(max(size.max() for size in sizes) / temperature),
    )


def of_starts(
    dims: Sequence[int], query: Array, positive: Array, *args: Any, **options: Any
) -> Expected:
    """The mean over `dims` of `reference` of the vectors' first numbers, scaled to length 1."""
    given = {"query": query, "positive": positive, "negatives": options.pop("negatives", None)}
    vectors = {name: one.astype(np.float64) for name, one in given.items() if one is not None}
    mean = Expected(0.0, *(np.zeros_like(vectors.get(name, query)) for name in given), 0.0, 0.0)
    for dim in dims:
        starts = {name: one[..., :dim] for name, one in vectors.items()}
        lengths = {n: np.linalg.norm(one, axis=-1, keepdims=True) for n, one in starts.items()}
        units = {name: starts[name] / lengths[name] for name in starts}
        one = reference(
            units["query"],
            units["positive"],
            *args,
            negatives=units.get("negatives"),
            **options,
        )
        mean.loss += one.loss / len(dims)
        mean.logit_scale += one.logit_scale / len(dims)
        mean.size = max(mean.size, one.size / min(float(each.min()) for each in lengths.values()))
        for name, unit in units.items():
            by_unit = getattr(one, name)
            along = (by_unit * unit).sum(-1, keepdims=True) * unit
            getattr(mean, name)[..., :dim] += (by_unit - along) / lengths[name] / len(dims)
    return mean


def one_direction(
    scores: Array, excluded: Array, label_smoothing: float = 0.0
) -> tuple[float, Array]:
    """Mean of -log softmax of the diagonal, and its gradient by the scores.

    Args:
        scores: ``[rows, candidates]``; candidate i is the right one for row i.
        excluded: Of the same shape: no candidates; the diagonal is one whatever stands there.
        label_smoothing: Share of the label that all candidates of the row have alike.
    """
    losses, gradient = np.zeros(len(scores)), np.zeros_like(scores)
    for i, row in enumerate(scores):
        others = np.flatnonzero(~excluded[i])
        others = others[others != i]
        rest = np.logaddexp.reduce(row[others]) if others.size else -np.inf
        losses[i] = np.logaddexp(0.0, rest - row[i])
        share = label_smoothing / (others.size + 1)
        losses[i] += share * (row[i] - row[others]).sum()
        gradient[i, others] = np.exp(row[others] - np.logaddexp(row[i], rest)) - share
        gradient[i, i] = -gradient[i].sum()  # softmax - 1, without the cancellation
    return float(losses.mean()), gradient / len(scores)


def unit_rows(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Random vectors of length 1, float32."""
    rows = np.random.default_rng(seed).normal(size=shape)
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def tolerance(temperature: float) -> float:
    """A score of size 1/temperature is rounded by 6e-8 of it, and exp makes that relative."""
    return 2e-6 + 5e-7 / temperature
