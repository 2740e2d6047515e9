"""Which runs must agree, how closely, and whether they do. NumPy alone; no Paddle.

Parameters are compared after AdamW has been at work, which divides a gradient by its own size:
where that is rounding noise (the bias of an attention's keys, whose true gradient is 0), the
parameter moves at random, however equal the gradients are. So a parameter's difference is measured
by its root mean square, against how far it moved and how far it could have moved, the sum of the
learning rates; and where the gradient is noise, only the latter bounds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_recompute.parity.records import Arrays, Figures, Outcome
from paddle_recompute.parity.variants import Case, Plan, Variant

NOISE = 1e-6
"""A parameter's gradient is rounding noise where it is below this share of the model's largest:
float32 has 24 bits, 6e-8, and sums of thousands of terms lose a digit of them."""


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may be apart; 0 everywhere: not one bit.

    Attributes:
        name: For the table.
        reason: Why it is not 0, or why it is.
        loss: Of losses and gradient norms, relative.
        gradient: Largest difference of a parameter's gradient, relative to its largest element...
        gradient_floor: ...plus this share of the largest element of the whole model's.
        parameter: Root mean square of a parameter's difference, relative to that of its way from
            the initial weights, plus the same share of the sum of the learning rates.
    """

    name: str
    reason: str
    loss: float = 0.0
    gradient: float = 0.0
    gradient_floor: float = 0.0
    parameter: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether not one bit may differ."""
        return self.loss == self.gradient == self.gradient_floor == self.parameter == 0


EXACT = Tolerance(
    "bit-equal", "recompute repeats the operators of the first forward, dropout masks included"
)
MODES = Tolerance(
    "modes",
    "the same operators on the same numbers, dropout masks included, but an executor may order or "
    "fuse them; seen: not one bit with ERNIE-tiny, 5e-7 of a loss with a learned temperature, 2e-6 "
    "with other models and Paddle 2.6.2",
    loss=1e-5,
    gradient=1e-5,
    gradient_floor=1e-7,
    parameter=1e-3,
)
RANKS = Tolerance(
    "ranks",
    "sums over the pairs or the ranks are made in another order; seen: 1e-5 of the gradient of "
    "a parameter, 5e-5 of its way after 5 steps",
    loss=1e-5,
    gradient=1e-4,
    gradient_floor=1e-6,
    parameter=1e-3,
)


@dataclass(frozen=True)
class Pair:
    """Two runs that must agree.

    Attributes:
        left: With `case`, the run that the other one is measured against.
        right: With the same case.
        case: What both train.
        tolerance: How closely.
    """

    left: Variant
    right: Variant
    case: Case
    tolerance: Tolerance


@dataclass(frozen=True)
class Verdict:
    """How two runs compare.

    Attributes:
        left: Name of the one.
        right: Name of the other.
        case: Name of what both trained.
        tolerance: What was asked.
        loss: Largest difference of a step's losses.
        gradient: Largest difference of an element of the first step's gradient.
        parameter: Largest difference of an element of a parameter after the last step.
        fault: What differs first, in words: ``"gradient of encoder.layers.0.linear1.weight: ..."``;
            None: all is within the tolerance.
    """

    left: str
    right: str
    case: str
    tolerance: Tolerance
    loss: float
    gradient: float
    parameter: float
    fault: str | None


def pairs(plan: Plan) -> list[Pair]:
    """Everything in `plan` that must agree.

    - Each mode with and without recompute, in every case, dropout included.
    - Dygraph with recompute and the reference, in every case.
    - The modes with each other, in every case: they draw the same dropout masks.
    - One process with several ranks, where nothing is random and the loss is over all ranks' pairs.
    """
    found = [
        Pair(left, right, case, tolerance)
        for left, right in itertools.product(plan.variants, repeat=2)
        for case in left.cases
        if (tolerance := _tolerance(left, right, case, plan.same_loss)) is not None
    ]
    return sorted(found, key=lambda pair: (EXACT, MODES, RANKS).index(pair.tolerance))


def compare(pair: Pair, left: Outcome, right: Outcome, initial: Arrays) -> Verdict:
    """Hold two runs against each other.

    Args:
        pair: Which they are.
        left: Of ``pair.left``.
        right: Of ``pair.right``.
        initial: The weights that both began with, by structured name.
    """
    faults = [
        *_figure_faults(left.figures, right.figures, pair.tolerance),
        *_gradient_faults(left.gradients, right.gradients, pair.tolerance),
        *_parameter_faults(left, right, initial, pair.tolerance),
    ]
    return Verdict(
        pair.left.name,
        pair.right.name,
        pair.case.name,
        pair.tolerance,
        loss=_largest_element([np.array(left.figures.losses) - np.array(right.figures.losses)]),
        gradient=_largest_difference(left.gradients, right.gradients),
        parameter=_largest_difference(left.parameters, right.parameters),
        fault=faults[0] if faults else None,
    )


def disagreement(ranks: Sequence[Figures]) -> str | None:
    """Where the ranks of a run have not the same losses and parameters, in words.

    Args:
        ranks: Their figures, in their order.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks[1:], 1):
        for name, digest in first.digests.items():
            if other.digests.get(name) != digest:
                return f"{name}: the parameters of rank 0 and rank {rank} differ"
        if other.losses != first.losses or other.grad_norms != first.grad_norms:
            return f"losses or gradient norms of rank 0 and rank {rank} differ"
    return None


def _tolerance(left: Variant, right: Variant, case: Case, same_loss: bool) -> Tolerance | None:
    """How closely two variants must agree; None: they are not compared, in this order at least."""
    same_mode, same_ranks = left.mode == right.mode, left.ranks == right.ranks
    if left.reference or right.reference:
        is_pair = left.recompute and same_mode and same_ranks and not left.reference
        # From three ranks on a sum depends on the order, which depends on the place in a buffer.
        return (EXACT if left.ranks <= 2 else RANKS) if is_pair else None
    if same_mode and same_ranks:
        return EXACT if right.recompute and not left.recompute else None
    if left.recompute != right.recompute or (case.dropout and not same_ranks):
        return None  # several ranks draw other masks than one process: each has its own seed
    if same_ranks and left.mode == "dygraph":
        # On several ranks a Program computes the loss of all pairs, dygraph that of its own.
        return RANKS if left.ranks > 1 and same_loss else MODES
    return RANKS if same_mode and left.ranks == 1 and same_loss else None


def _figure_faults(left: Figures, right: Figures, tolerance: Tolerance) -> Iterator[str]:
    for what, ours, theirs in (
        ("loss", left.losses, right.losses),
        ("gradient norm", left.grad_norms, right.grad_norms),
    ):
        if len(ours) != len(theirs):
            yield f"{what}: {len(ours)} steps and {len(theirs)}"
        for step, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
            if not abs(one - other) <= tolerance.loss * abs(one):
                yield f"{what} of step {step}: {one:.9g} and {other:.9g}"
                break


def _gradient_faults(left: Arrays, right: Arrays, tolerance: Tolerance) -> Iterator[str]:
    yield from _name_faults("gradient", left, right)
    floor = tolerance.gradient_floor * _size(left)
    for name in _shared(left, right):
        allowed = tolerance.gradient * _largest_element([left[name]]) + floor
        found = _largest_element([left[name] - right[name]])
        if not found <= allowed:
            yield f"gradient of {name}: an element differs by {found:.3g}, allowed is {allowed:.3g}"


def _parameter_faults(
    left: Outcome, right: Outcome, initial: Arrays, tolerance: Tolerance
) -> Iterator[str]:
    yield from _name_faults("parameter", left.parameters, right.parameters)
    farthest = sum(left.figures.learning_rates)
    noise = NOISE * _size(left.gradients)
    for name in _shared(left.parameters, right.parameters):
        one, other = left.parameters[name], right.parameters[name]
        found, way = _root_mean_square(one - other), _root_mean_square(one - initial[name])
        allowed = tolerance.parameter * (way + farthest)
        gradient = left.gradients.get(name)
        if not tolerance.is_exact and gradient is not None and _largest_element([gradient]) < noise:
            allowed = 2 * farthest
        if not found <= allowed:
            yield (
                f"parameter {name}: differs by {found:.3g} (root mean square), allowed is "
                f"{allowed:.3g}"
            )


def _name_faults(what: str, left: Arrays, right: Arrays) -> Iterator[str]:
    for name in [*left, *right]:
        if name not in left or name not in right:
            yield f"{what} of {name}: only one of the two has it"
        elif left[name].shape != right[name].shape:
            yield f"{what} of {name}: shapes {left[name].shape} and {right[name].shape}"


def _shared(left: Arrays, right: Arrays) -> list[str]:
    return [name for name in left if name in right and left[name].shape == right[name].shape]


def _largest_difference(left: Arrays, right: Arrays) -> float:
    return _largest_element(left[name] - right[name] for name in _shared(left, right))


def _size(gradients: Arrays) -> float:
    """The largest element of the whole model's, NaN and infinities left out: those are found in the
    parameter that has them, and must not excuse or blame another.
    """
    finite = (array[np.isfinite(array)] for array in gradients.values())
    return _largest_element(finite)


def _largest_element(arrays: Iterable[NDArray[Any]]) -> float:
    """NaN if there is one."""
    return float(np.max([np.abs(array).max(initial=0.0) for array in arrays], initial=0.0))


def _root_mean_square(array: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0
