"""What the ranks tell each other at the end of each step, in one small collective.

Thirteen numbers are summed: what has happened to the gradients, how many examples there were, the
loss, and a hash of what must be the same everywhere. That the hash is the same is seen from the sum
of its two halves and the sums of their squares: n times the sum of squares is the square of the sum
only where all n are equal. So whatever goes well, nothing is listed by rank, and nothing goes
through rank 0; where the hash differs, the ranks meet there and compare what they have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import paddle

from paddle_recompute.distributed import Scope, agree_on_options
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync._all_reduce import AllReducer
from paddle_recompute.grad_sync._roll import Roll, agree_on_trained

_HALF_OF_HASH = 20
"""Bits; sums of squares of 8,192 ranks are exact in float64."""


class Told(NamedTuple):
    """What has happened on some rank."""

    late: bool = False
    """A gradient was added to after it was sent."""
    touched: bool = False
    """A gradient was changed by hand after it was sent."""
    changed: bool = False
    """Other parameters take part than in the step before."""
    missing: bool = False
    """One that has a place in a bucket has no gradient."""
    besides: bool = False
    """There is a gradient without a place in a bucket."""
    more: bool = False
    """A gradient was added to more often than expected."""

    @property
    def concerns_presence(self) -> bool:
        return self.late or self.touched or self.changed or self.missing or self.besides


@dataclass
class StepReport:
    """What a caller adds to the agreement of one step.

    Attributes:
        count: The examples of this rank, or another weight.
        terms: What must be the same on all ranks, by name; as JSON takes it.
        losses: One-element tensors on the device; their sum is this rank's loss.
    """

    count: float = 0.0
    terms: Mapping[str, Any] = field(default_factory=dict)
    losses: list[paddle.Tensor] = field(default_factory=list)

    @paddle.no_grad()
    def loss(self) -> paddle.Tensor | None:
        """Float64, ``[1]``; in the order in which the losses were added."""
        total: paddle.Tensor | None = None
        for loss in self.losses:
            one = loss.astype("float64").reshape([1])
            total = one if total is None else total + one
        if total is None:
            return None
        # Infinities of both signs on two ranks have no mean.
        return paddle.where(total == -float("inf"), paddle.full_like(total, float("nan")), total)


@dataclass(frozen=True)
class Agreed:
    """Means over the ranks of what `StepReport` has."""

    count: float
    loss: float


class Agreement:
    """The small collective of one `GradientSync`.

    Args:
        roll: Which parameters take part must be the same everywhere.
        scope: The ranks.
        all_reducer: Takes what is sent in one order.
    """

    def __init__(self, roll: Roll, scope: Scope, all_reducer: AllReducer) -> None:
        self._roll = roll
        self._scope = scope
        self._all_reducer = all_reducer

    def reach(
        self, own: Told, report: StepReport, label: Callable[[str], str]
    ) -> tuple[Told, Agreed]:
        """What has happened on any rank, and the means.

        Raises:
            SyncError: The ranks do not train the same, or what `report` says must be the same is
                not; the message names what differs.
        """
        numbers = [*map(float, own), *_halves(self._hash(report)), report.count]
        what = label("end of the backward")
        *sums, loss = self._all_reducer.sums(numbers, report.loss(), what, self._scope)
        size = len(self._scope.ranks)
        flags, (first, first_squares, second, second_squares), count = (
            sums[:6],
            sums[6:10],
            sums[10],
        )
        if not (
            _is_one_number(first, first_squares, size)
            and _is_one_number(second, second_squares, size)
        ):
            self._explain(report)
        return Told(*(flag > 0 for flag in flags)), Agreed(count / size, loss / size)

    def check_parameters(self, label: str) -> None:
        """Check that the same parameters take part on all ranks; where they do, rank 0 has nothing
        to do with it.
        """
        high, low = _split(self._roll.digest)
        numbers = [high, -high, low, -low]
        largest = self._all_reducer.largest(numbers, label, self._scope)
        if largest[0] != -largest[1] or largest[2] != -largest[3]:
            agree_on_trained(self._roll, self._scope)

    def _hash(self, report: StepReport) -> int:
        terms = json.dumps(dict(report.terms), sort_keys=True)
        text = f"{self._roll.digest} {terms}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")

    def _explain(self, report: StepReport) -> None:
        agree_on_trained(self._roll, self._scope)
        agree_on_options(report.terms, self._scope, of="TrainStep was called")
        raise SyncError(
            "the ranks do not do the same in this step: some call GradientSync through TrainStep, "
            "others not, or in another way"
        )


def _split(number: int) -> tuple[int, int]:
    mask = (1 << _HALF_OF_HASH) - 1
    return number & mask, (number >> _HALF_OF_HASH) & mask


def _halves(number: int) -> Sequence[float]:
    high, low = _split(number)
    return high, high * high, low, low * low


def _is_one_number(total: float, squares: float, size: int) -> bool:
    return int(total) ** 2 == size * int(squares)
