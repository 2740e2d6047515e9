"""Batches that were not measured: bytes are affine in the rows, a score matrix is quadratic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute.errors import PlanError
from paddle_recompute.planner.costs import StepCosts, combined, have_same_calls
from paddle_recompute.planner.job import Job, check_count
from paddle_recompute.planner.measured_costs import Progress, measure_costs

_SCALED = {"base", "held", "kept", "rise", "peak", "level"}
_SCALED |= {"parts_kept", "parts_rise", "parts_again"}
"""Fields with bytes that grow with the rows."""


def rows_of(batch: Any) -> int:
    """Length of the first axis of the first tensor of `batch`."""
    tensor = next(_nested.tensors_in(batch), None)
    if tensor is None or tensor.ndim == 0:
        raise PlanError("the batch has no Tensor with rows, so its size cannot be changed")
    return int(tensor.shape[0])


def with_rows(batch: Any, rows: int) -> Any:
    """`batch` with `rows` rows, of all tensors with as many: some at equal distances, or repeated.

    So a few rows of a batch that is sorted by length have about its share of padding.
    """
    size = rows_of(batch)

    def resize(tensor: paddle.Tensor) -> paddle.Tensor:
        if tensor.ndim == 0 or tensor.shape[0] != size:
            return tensor
        number, few = paddle.arange(rows, dtype="int64"), min(rows, size)
        index = (2 * number + 1) * size // (2 * few) % size
        return paddle.gather(tensor, index).detach()

    return _nested.map_tensors(resize, batch)


def costs_of_batch(job: Job, rows: int | None, progress: Progress | None = None) -> StepCosts:
    """The costs of a step with a batch of `rows` rows; None: of the sample batch.

    Other sizes are extrapolated from three small ones.

    Raises:
        ConfigError: `rows` is no number of rows.
        PlanError: The step makes other calls with another batch.
    """
    if rows is not None:
        check_count("batch_size", rows)
    if rows is None or rows == rows_of(job.batch):
        return measure_costs(job, progress=progress)
    return extrapolated(probe(job, progress), rows)


def probe(job: Job, progress: Progress | None = None) -> dict[int, StepCosts]:
    """The costs of three batches, the largest of which is at most the sample batch."""
    size = rows_of(job.batch)
    unit = max(1, min(size // 4, 16))
    same = with_rows(job.batch, unit)  # the padding of other rows would bend the line
    return {
        n: measure_costs(replace(job, batch=with_rows(same, n)), progress=progress)
        for n in (unit * 2, unit * 3, unit * 4)
    }


def extrapolated(probes: dict[int, StepCosts], rows: int) -> StepCosts:
    """The costs of `rows` rows, from those of three sizes.

    Raises:
        PlanError: The probes are of steps with different calls.
    """
    sizes, known = list(probes), list(probes.values())
    if not have_same_calls(known):
        raise PlanError("the step makes other calls with another batch, so it cannot be scaled")

    def merge(name: str, values: Sequence[Any]) -> Any:
        if name in ("seconds", "time", "recomputed_seconds", "parts_seconds"):
            # In proportion: a line through two short times would be all noise.
            return values[-1] * rows / sizes[-1]
        return round(_quadratic(sizes, values, rows)) if name in _SCALED else values[0]

    return combined(known, merge)  # type: ignore[no-any-return]


def _quadratic(sizes: Sequence[int], values: Sequence[int], at: int) -> float:
    """The parabola through three points; a straight line where they are nearly on one.

    Three points of a peak may be on different branches of a maximum; a bend that is small against
    the values is taken for that, and the line through the two largest sizes is used.
    """
    line = _line(sizes, values, at)
    if _is_straight(sizes, values):
        return line
    return line + _bend(sizes, values) * (at - sizes[1]) * (at - sizes[2])


def _line(sizes: Sequence[int], values: Sequence[int], at: int) -> float:
    """The straight line through the points of the two largest sizes."""
    (_, b, c), (_, y, z) = sizes, values
    return z + (z - y) / (c - b) * (at - c)


def _bend(sizes: Sequence[int], values: Sequence[int]) -> float:
    (a, b, c), (x, y, z) = sizes, values
    return ((z - y) / (c - b) - (y - x) / (b - a)) / (c - a)


def _is_straight(sizes: Sequence[int], values: Sequence[int]) -> bool:
    return abs(_bend(sizes, values)) * (sizes[2] - sizes[0]) ** 2 < 1e-3 * max(abs(values[2]), 1)
