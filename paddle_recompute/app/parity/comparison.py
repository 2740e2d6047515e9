"""Which runs must agree, how closely, and whether they do.

Parameters are compared after AdamW's updates. AdamW divides a gradient by its own size. If the
gradient is rounding noise (the bias of an attention's keys, whose true gradient is 0), the
parameter moves at random, even if the gradients are equal. So the root mean square of a parameter's
difference is compared with two distances: how far the parameter moved, and how far it can move at
most (the sum of the learning rates). If the gradient is noise, only the second distance counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paddle_recompute import comparison
from paddle_recompute.app.config import Config
from paddle_recompute.comparison import Array, differences, largest

Arrays = dict[str, Array]
FLEET = "dygraph fleet"
"""The reference: Paddle's own recompute and synchronization of gradients."""
RUNS = ("dygraph plain", "dygraph recompute", FLEET, "static plain", "static recompute")
PAIRS = (
    ("dygraph plain", "dygraph recompute"),
    ("dygraph recompute", FLEET),
    ("static plain", "static recompute"),
    ("dygraph plain", "static plain"),
    ("dygraph recompute", "static recompute"),
)
"""The runs that must agree, the second with the first."""
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
        gradient: Of the parameters' gradients.
        parameter: Root mean square of a parameter's difference, relative to the root mean square of
            its movement from the initial weights plus the sum of the learning rates.
    """

    name: str
    reason: str
    loss: float = 0.0
    gradient: comparison.Tolerance = comparison.EXACT
    parameter: float = 0.0

    def __str__(self) -> str:
        if self == EXACT:
            return f"{self.name}: not one bit differs; {self.reason}"
        return (
            f"{self.name}: losses within {self.loss:g}; gradients within "
            f"{self.gradient.relative:g} of a parameter's largest element and "
            f"{self.gradient.of_run:g} of the model's; parameters within {self.parameter:g} of "
            f"their movement; {self.reason}"
        )


EXACT = Tolerance(
    "bit-equal", "recompute repeats the operators of the first forward, dropout masks included"
)
BETWEEN_MODES = Tolerance(
    "modes",
    "the same operators on the same numbers, dropout masks included, but an executor may reorder "
    "or fuse them; measured: no difference with ERNIE-tiny, 5e-7 of a loss with a learned "
    "temperature, 2e-6 with other models and Paddle 2.6.2",
    loss=1e-5,
    gradient=comparison.Tolerance(1e-5, 1e-7),
    parameter=1e-3,
)
BETWEEN_RANKS = Tolerance(
    "ranks",
    "sums over the pairs or the ranks are computed in another order; measured: 1e-5 of a "
    "parameter's gradient, 5e-5 of its movement after 5 steps",
    loss=1e-5,
    gradient=comparison.Tolerance(1e-4, 1e-6),
    parameter=1e-3,
)


@dataclass
class Outcome:
    """A training run.

    Attributes:
        losses: Of every step, the mean over all pairs.
        grad_norms: Of every step, before clipping.
        learning_rates: Of every step.
        gradients: Gradients of the first step as the optimizer gets them: synchronized and clipped;
            by structured name.
        parameters: Parameters and buffers after the last step, by structured name.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    gradients: Arrays = field(default_factory=dict)
    parameters: Arrays = field(default_factory=dict)


def tolerance_of(left: str, right: str, config: Config) -> Tolerance:
    """How far two runs of `PAIRS` may differ."""
    ranks = config.world_size
    if left.split()[0] == right.split()[0]:
        # With three ranks or more, a sum depends on the order of the ranks in the buffer.
        return BETWEEN_RANKS if right == FLEET and ranks > 2 else EXACT
    # With several ranks, a Program computes the loss of all pairs, dygraph that of its rank.
    return (
        BETWEEN_RANKS if ranks > 1 and config.contrastive.negatives == "global" else BETWEEN_MODES
    )


def compare(left: Outcome, right: Outcome, initial: Arrays, tolerance: Tolerance) -> dict[str, Any]:
    """The largest differences between two runs, and the first one beyond the tolerance.

    Args:
        left: The first run.
        right: The run that must agree with it.
        initial: The weights that both began with, by structured name.
        tolerance: How far they may differ.

    Returns:
        JSON values: the differences of losses, of elements of the first gradient and of elements of
        the parameters after the last step; ``fault``: a sentence, or None.
    """
    return {
        "tolerance": tolerance.name,
        "loss_difference": largest(np.array(left.losses) - np.array(right.losses)),
        "gradient_difference": _largest_difference(left.gradients, right.gradients),
        "parameter_difference": _largest_difference(left.parameters, right.parameters),
        "fault": next(_faults(left, right, initial, tolerance), None),
    }


def _faults(left: Outcome, right: Outcome, initial: Arrays, tolerance: Tolerance) -> Iterator[str]:
    for what, ours, theirs in (
        ("loss", left.losses, right.losses),
        ("gradient norm", left.grad_norms, right.grad_norms),
    ):
        for step, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
            if not abs(one - other) <= tolerance.loss * abs(one):
                yield f"{what} of step {step}: {one:.9g} and {other:.9g}"
    movement = _Movement(left, initial, tolerance)
    for what, our, their, allowed, measure in (
        ("gradient", left.gradients, right.gradients, tolerance.gradient, largest),
        ("parameter", left.parameters, right.parameters, movement, _root_mean_square),
    ):
        wrong = {
            name: difference.words
            for name, difference in differences(our, their, allowed, measure).items()
        }
        for name in {**our, **their}:
            if name in our and not np.isfinite(our[name]).all():
                yield f"{what} of {name}: it is not finite"
            elif name in wrong:
                yield f"{what} of {name}: {wrong[name]}"


class _Movement:
    """How far parameters may differ, for how far they have moved and could have."""

    def __init__(self, left: Outcome, initial: Arrays, tolerance: Tolerance) -> None:
        self._left, self._initial, self._tolerance = left, initial, tolerance
        self._farthest = sum(left.learning_rates)
        gradients = {name: largest(gradient) for name, gradient in left.gradients.items()}
        noise = NOISE * max(filter(np.isfinite, gradients.values()), default=0.0)
        self._noise = {name for name, size in gradients.items() if size < noise}

    def allowed(self, name: str, size: float, _: float) -> float:
        if name in self._noise and self._tolerance != EXACT:
            return 2 * self._farthest
        moved = _root_mean_square(self._left.parameters[name] - self._initial[name])
        return self._tolerance.parameter * (moved + self._farthest)


def _largest_difference(left: Arrays, right: Arrays) -> float:
    return max(
        (
            largest(left[name] - right[name])
            for name in {*left} & {*right}
            if left[name].shape == right[name].shape
        ),
        default=0.0,
    )


def _root_mean_square(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64)))) if array.size else 0.0
