"""Random losses against the formulas in float64 NumPy.

Three kinds of vectors. "exact" ones are small whole numbers times powers of two, as is the scale:
their scores, up to 1e9, are exact in float32, ties included, so the result must be right whatever
their size. "random" ones are rounded, so their scores are small and the tolerance says how small.
"large" ones have rounded scores of up to 1e9: the loss must be right to the last digits of these,
and the gradients where rounding cannot have changed which score is the largest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import strategies as st

from paddle_recompute import ContrastiveLoss
from tests.contrastive.loss_reference import reference
from tests.fuzz import budget

ROUNDING = 1e-5
"""Of float32 sums of a few dozen terms, against the size of the terms."""


pytestmark = pytest.mark.timeout(120 + budget.examples(0))  # far less than 1 s each


@dataclass(frozen=True)
class Program:
    numbers: int
    pairs: int
    dim: int
    negatives: int
    kind: str
    log2_size: int
    log2_scale: int
    symmetric: bool
    tile: int | None
    label_smoothing: float
    masked: bool
    num_ids: int
    normalize: bool
    learned: bool
    dtype: str
    frozen: int | None
    factor: float


PROGRAMS = st.builds(
    Program,
    numbers=st.integers(0, 2**16),
    pairs=st.integers(2, 9),
    dim=st.integers(1, 6),
    negatives=st.integers(0, 3),
    kind=st.sampled_from(["exact", "random", "large"]),
    log2_size=st.sampled_from([-4, 0, 3, 8, 11, 12]),
    log2_scale=st.sampled_from([0, 2, 6, 4]),
    symmetric=st.booleans(),
    tile=st.sampled_from([None, None, 1, 2, 3, 16]),
    label_smoothing=st.sampled_from([0.0, 0.0, 0.1, 0.9]),
    masked=st.booleans(),
    num_ids=st.integers(1, 12),
    normalize=st.booleans(),
    learned=st.booleans(),
    dtype=st.sampled_from(["float32", "float32", "float64"]),
    frozen=st.sampled_from([None, None, 0, 1]),
    factor=st.sampled_from([1.0, 0.5, 1024.0]),
)


def check(program: Program) -> None:
    rng = np.random.default_rng(program.numbers)
    scale = 2.0**program.log2_scale
    exact, large = program.kind == "exact", program.kind == "large"
    normalize = program.normalize and program.kind == "random"
    learned = program.learned and program.kind == "random"

    def vectors(*rows: int) -> Any:
        if exact:
            return rng.integers(-3, 4, (*rows, program.dim)) * 2.0**program.log2_size
        found = rng.normal(size=(*rows, program.dim))
        if large:
            return found * 2.0**program.log2_size
        length = np.linalg.norm(found, axis=-1, keepdims=True)
        return found if normalize else found / length

    query, positive = (vectors(program.pairs).astype(program.dtype) for _ in range(2))
    negatives = None
    if program.negatives:
        negatives = vectors(program.pairs, program.negatives).astype(program.dtype)
    ids = rng.integers(0, program.num_ids, program.pairs) if program.masked else None
    negative_ids = None
    if program.masked and negatives is not None:
        negative_ids = rng.integers(0, program.num_ids, negatives.shape[:2])
    loss = ContrastiveLoss(
        1 / scale,
        program.symmetric,
        learnable_temperature=learned,
        label_smoothing=program.label_smoothing,
        tile=program.tile,
        mask_false_negatives=program.masked,
        normalize=normalize,
    )
    given = [query, positive, *([] if negatives is None else [negatives])]
    tensors = [paddle.to_tensor(one, stop_gradient=False) for one in given]
    if program.frozen is not None:
        tensors[program.frozen].stop_gradient = True
    named = {}
    if ids is not None:
        named["positive_ids"] = paddle.to_tensor(ids)
    if negative_ids is not None:
        named["negative_ids"] = paddle.to_tensor(negative_ids)
    value = loss(*tensors, **named)
    (value * program.factor).backward()

    units = [one.astype("float64") for one in given]
    lengths = [np.linalg.norm(one, axis=-1, keepdims=True) for one in units]
    if normalize:
        units = [one / length for one, length in zip(units, lengths, strict=True)]
    expected = reference(
        units[0],
        units[1],
        1 / scale,
        program.symmetric,
        negatives=units[2] if negatives is not None else None,
        ids=ids,
        negative_ids=negative_ids,
        label_smoothing=program.label_smoothing,
    )
    largest = max(float((one**2).sum(axis=-1).max()) for one in units) * scale
    # What is exact has no rounded scores; a sum of losses is rounded as a number of their size.
    inexact = 0.0 if exact else largest
    wanted = abs(expected.loss) + largest * (program.label_smoothing + (0.0 if exact else 0.1))
    assert abs(float(value) - expected.loss) <= ROUNDING * wanted + 1e-30
    if large:
        scores = (
            scale * units[0] @ np.concatenate([one.reshape(-1, program.dim) for one in units[1:]]).T
        )
        gaps = [np.diff(np.sort(scores, axis=1), axis=1).min()]
        gaps.append(np.diff(np.sort(scores[:, : program.pairs], axis=0), axis=0).min())
        if min(gaps) < 1e-5 * largest:
            assert all(np.isfinite(t.grad.numpy()).all() for t in tensors if t.grad is not None)
            return
    by_vectors = [expected.query, expected.positive, expected.negatives]
    for place, tensor in enumerate(tensors):
        if place == program.frozen:
            assert tensor.grad is None
            continue
        right = by_vectors[place]
        size = expected.size
        if normalize:
            along = (right * units[place]).sum(axis=-1, keepdims=True)
            right = (right - along * units[place]) / lengths[place]
            size = expected.size / float(lengths[place].min())
        error = np.abs(tensor.grad.numpy() / program.factor - right).max()
        assert error <= (ROUNDING + 1e-6 * inexact) * size + 1e-33 * scale, (place, error, size)
    if learned:
        error = abs(loss.logit_scale.grad.item() / program.factor - expected.logit_scale)
        assert error <= (ROUNDING + 1e-6 * inexact) * largest + 1e-30


def test_losses_against_float64() -> None:
    budget.fuzz(PROGRAMS, check, 42)


@pytest.mark.parametrize("tile", [None, 2])
def test_what_the_fuzzer_found(tile: int | None) -> None:
    """Scores of 1e9: own + m was rounded, so exp(score - (own + m)) was infinite or 0."""
    size = {"kind": "large", "log2_size": 12, "log2_scale": 6}
    plain = {"masked": False, "num_ids": 1, "normalize": False, "learned": False, "frozen": None}
    shape = {"pairs": 5, "dim": 4, "negatives": 0, "symmetric": True, "dtype": "float32"}
    options = {**size, **plain, **shape, "label_smoothing": 0.0, "factor": 1.0}
    check(Program(numbers=0, tile=tile, **options))
