"""Which runs must agree, how closely, and whether they do. NumPy alone; no Paddle.

Parameters are compared after AdamW's updates. AdamW divides a gradient by its own size. If the
gradient is rounding noise (the bias of an attention's keys, whose true gradient is 0), the
parameter moves at random, even if the gradients are equal. So the root mean square of a parameter's
difference is compared with two distances: how far the parameter moved, and how far it can move at
most (the sum of the learning rates). If the gradient is noise, only the second distance counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_recompute.app.parity.outcome import Arrays, Outcome
from paddle_recompute.app.parity.variants import Plan, Variant

NOISE = 1e-6
"""A parameter's gradient is rounding noise if it is below this share of the model's largest one:
float32 has 24 bits (6e-8), and sums of thousands of terms lose about one digit."""


@dataclass(frozen=True)
class Tolerance:
    """How far two runs may differ; 0 everywhere: not by one bit.

    Attributes:
        name: The name in the table.
        reason: Why it is 0, or why it is not.
        loss: Of losses and gradient norms, relative.
        gradient: Largest difference in a parameter's gradient, relative to its largest element...
        gradient_floor: ...plus this share of the largest element of all gradients.
        parameter: Root mean square of a parameter's difference, relative to the root mean square of
            its movement from the initial weights plus the sum of the learning rates.
    """

    name: str
    reason: str
    loss: float = 0.0
    gradient: float = 0.0
    gradient_floor: float = 0.0
    parameter: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether the runs must be equal bit by bit."""
        return self.loss == self.gradient == self.gradient_floor == self.parameter == 0


EXACT = Tolerance(
    "bit-equal", "recompute repeats the operators of the first forward, dropout masks included"
)
BETWEEN_MODES = Tolerance(
    "modes",
    "the same operators on the same numbers, dropout masks included, but an executor may reorder "
    "or fuse them; measured: no difference with ERNIE-tiny, 5e-7 of a loss with a learned "
    "temperature, 2e-6 with other models and Paddle 2.6.2",
    loss=1e-5,
    gradient=1e-5,
    gradient_floor=1e-7,
    parameter=1e-3,
)
BETWEEN_RANKS = Tolerance(
    "ranks",
    "sums over the pairs or the ranks are computed in another order; measured: 1e-5 of a "
    "parameter's gradient, 5e-5 of its movement after 5 steps",
    loss=1e-5,
    gradient=1e-4,
    gradient_floor=1e-6,
    parameter=1e-3,
)


Pair = tuple[Variant, Variant, Tolerance]
"""Two runs that must agree, the second with the first, and how far they may differ."""


@dataclass(frozen=True)
class Verdict:
    """The result of comparing two runs.

    Attributes:
        left: Name of the run to compare with.
        right: Name of the run that is compared.
        case: Name of the case of both.
        tolerance: The tolerance of the comparison.
        loss_difference: The largest of a step's losses.
        gradient_difference: The largest of an element of the first step's gradient.
        parameter_difference: The largest of an element of a parameter after the last step.
        fault: The first difference beyond the tolerance:
            ``"gradient of encoder.layers.0.linear1.weight: ..."``; None: there is none.
    """

    left: str
    right: str
    case: str
    tolerance: Tolerance
    loss_difference: float
    gradient_difference: float
    parameter_difference: float
    fault: str | None


def pairs(plan: Plan) -> list[Pair]:
    """All pairs of runs in `plan` that must agree.

    - Each mode with and without recompute, in every case, dropout included.
    - Dygraph with recompute and the reference, in every case.
    - The modes with each other, in every case: they draw the same dropout masks.
    - One process with several ranks, without dropout, if the loss is over the pairs of all ranks.
    """
    found = [
        (left, right, tolerance)
        for left, right in itertools.product(plan.variants, repeat=2)
        if (tolerance := _tolerance(left, right, plan)) is not None
    ]
    return sorted(found, key=lambda pair: (EXACT, BETWEEN_MODES, BETWEEN_RANKS).index(pair[2]))


def compare(pair: Pair, left: Outcome, right: Outcome, initial: Arrays) -> Verdict:
    """Compare two runs.

    Args:
        pair: The runs and their tolerance.
        left: The outcome of the first.
        right: The outcome of the second.
        initial: The initial weights of both, by structured name.
    """
    one, other, tolerance = pair
    faults = [
        *_figure_faults(left, right, tolerance),
        *_gradient_faults(left.gradients, right.gradients, tolerance),
        *_parameter_faults(left, right, initial, tolerance),
    ]
    return Verdict(
        one.name,
        other.name,
        one.case,
        tolerance,
        loss_difference=_largest_element([np.array(left.losses) - np.array(right.losses)]),
        gradient_difference=_largest_difference(left.gradients, right.gradients),
        parameter_difference=_largest_difference(left.parameters, right.parameters),
        fault=faults[0] if faults else None,
    )


def _tolerance(left: Variant, right: Variant, plan: Plan) -> Tolerance | None:
    """The tolerance of a pair of variants; None: they are not compared, at least in this order."""
    if left.dropout != right.dropout:
        return None
    same_mode, same_ranks = left.mode == right.mode, left.ranks == right.ranks
    if left.reference or right.reference:
        is_pair = left.recompute and same_mode and same_ranks and not left.reference
        # With three ranks or more, a sum depends on the order of the ranks in the buffer.
        return (EXACT if left.ranks <= 2 else BETWEEN_RANKS) if is_pair else None
    if same_mode and same_ranks:
        return EXACT if right.recompute and not left.recompute else None
    if left.recompute != right.recompute or (left.dropout and not same_ranks):
        return None  # each rank has its own seed and draws other masks than one process
    if same_ranks and left.mode == "dygraph":
        # With several ranks, a Program computes the loss of all pairs, dygraph that of its rank.
        return BETWEEN_RANKS if left.ranks > 1 and plan.global_loss else BETWEEN_MODES
    return BETWEEN_RANKS if same_mode and left.ranks == 1 and plan.across_ranks else None


def _figure_faults(left: Outcome, right: Outcome, tolerance: Tolerance) -> Iterator[str]:
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
    farthest = sum(left.learning_rates)
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
    """The largest finite element of all gradients. A parameter with NaN or infinity is reported on
    its own and must not change the bound of the others.
    """
    finite = (array[np.isfinite(array)] for array in gradients.values())
    return _largest_element(finite)


def _largest_element(arrays: Iterable[NDArray[Any]]) -> float:
    """NaN if there is one."""
    return float(np.max([np.abs(array).max(initial=0.0) for array in arrays], initial=0.0))


def _root_mean_square(array: NDArray[Any]) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0
