"""What the ranks tell each other at the end of each step, in one small collective.

Sixteen numbers of the hosts are summed: what has happened to the gradients, how many examples
there were, a hash of what must be the same everywhere, and whether a rank has given up a Program.
With them travels the loss; on a device in a collective of its own, which no host waits for.

That a hash is the same is seen from the sums of its two halves and of their squares: n times the
sum of squares is the square of the sum only where all n are equal. So where all goes well, nothing
is listed by rank, and nothing goes through rank 0; where the hash differs, the ranks meet there and
compare what they have.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import paddle

from paddle_recompute.distributed import (
    Scope,
    agree_on_options,
    buffers_of,
    first_that_differs,
    withdrawals,
)
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync._all_reduce import AllReducer
from paddle_recompute.grad_sync._roll import Roll, agree_on_trained

_logger = logging.getLogger("paddle_recompute")

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
        count: The examples of this rank, or another weight: the gradient becomes the mean over all
            examples. None: the mean over the ranks.
        terms: What must be the same on all ranks, by name; as JSON takes it.
        divisor: What the loss of the micro-batch under way counts less than its value.
        losses: One-element float64 tensors on the device; their sum is this rank's loss.
    """

    count: float | None = None
    terms: Mapping[str, Any] = field(default_factory=dict)
    divisor: float = 1.0
    losses: list[paddle.Tensor] = field(default_factory=list)

    @paddle.no_grad()
    def loss(self) -> paddle.Tensor:
        """Float64, ``[2]``: the loss, added up in the order of `losses`, and `count` times that."""
        if not self.losses:
            return paddle.zeros([2], "float64")
        total = self.losses[0]
        for loss in self.losses[1:]:
            total = total + loss
        # Infinities of both signs on two ranks have no mean.
        total = paddle.where(total == -float("inf"), paddle.full_like(total, float("nan")), total)
        return paddle.concat([total, total * (self.count or 1.0)])


@dataclass(frozen=True)
class Agreed:
    """What came of it.

    Attributes:
        count: Mean of the ranks' counts; 0 where there are none.
        counts_differ: Whether they are not all the same.
        loss: Mean over all examples; float64, ``[1]``, on the device.
    """

    count: float
    counts_differ: bool
    loss: paddle.Tensor


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
        withdrawals.tell_with(self)

    def reach(
        self, own: Told, report: StepReport, label: Callable[[str], str]
    ) -> tuple[Told, Agreed]:
        """What has happened on any rank, and the means.

        Raises:
            SyncError: The ranks do not train the same, or what `report` says must be the same is
                not; the message names what differs.
        """
        count = report.count or 0.0
        numbers = [
            *map(float, own),
            *_halves(_hash(self._terms(report))),
            *_halves(_hash(float(count).hex())),
            count,
            withdrawals.has_withdrawn(),
        ]
        what = label("end of the backward")
        sums, losses = self._all_reducer.sums(numbers, report.loss(), what, self._scope)
        size = len(self._scope.ranks)
        if not _is_one_number(sums[6:10], size):
            self._explain(report)
        told = Told(*(flag > 0 for flag in sums[:6]))
        differ = not _is_one_number(sums[10:14], size)
        total = sums[14]
        if sums[15] > 0:
            withdrawals.follow()
        with paddle.no_grad():
            loss = losses[1:] / total if differ else losses[:1] / size
        return told, Agreed(total / size, differ, loss)

    def weight_of(self, count: float, label: str) -> float:
        """`count` relative to the mean over the ranks; 1 to the bit where all are the same."""
        numbers = [*_halves(_hash(float(count).hex())), count]
        nothing = paddle.zeros([0], "float64")
        (*halves, total), _ = self._all_reducer.sums(numbers, nothing, label, self._scope)
        size = len(self._scope.ranks)
        return 1.0 if _is_one_number(halves, size) else count / (total / size)

    def check_parameters(self, label: str) -> None:
        """Check that the same parameters take part on all ranks; where they do, rank 0 has nothing
        to do with it.
        """
        high, low = _split(self._roll.digest)
        numbers = [high, -high, low, -low]
        largest = self._all_reducer.largest(numbers, label, self._scope)
        if largest[0] != -largest[1] or largest[2] != -largest[3]:
            agree_on_trained(self._roll, self._scope)

    def _terms(self, report: StepReport) -> str:
        told = json.dumps(dict(report.terms), sort_keys=True)
        return f"{self._roll.digest} {report.count is None} {told}"

    def _explain(self, report: StepReport) -> None:
        agree_on_trained(self._roll, self._scope)
        agree_on_options(report.terms, self._scope, of="TrainStep was called")
        raise SyncError(
            "the ranks do not do the same in this step: some call GradientSync through TrainStep, "
            "others not, or in another way"
        )


def warn_of_buffers(model: paddle.nn.Layer, scope: Scope, step: int) -> bool:
    """Whether the ranks have different buffers, as BatchNorms give them; then the log says so."""
    buffers = buffers_of(model)
    difference = first_that_differs(list(buffers.values()), scope) if buffers else None
    if difference is not None:
        index, ranks = difference
        _logger.warning(
            "gradient sync: the buffer '%s' differs between the ranks: in step %d on rank %s. "
            "Before you evaluate or save, call equal_buffers(model) (paddle_recompute.distributed) "
            "on all ranks, as Trainer does.",
            list(buffers)[index],
            step,
            ", ".join(map(str, ranks)),
        )
    return difference is not None


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _split(number: int) -> tuple[int, int]:
    mask = (1 << _HALF_OF_HASH) - 1
    return number & mask, (number >> _HALF_OF_HASH) & mask


def _halves(number: int) -> Sequence[float]:
    high, low = _split(number)
    return high, high * high, low, low * low


def _is_one_number(sums: Sequence[float], size: int) -> bool:
    """Whether all ranks had the same number, from the sums over the ranks of its `_halves`."""
    first, first_squares, second, second_squares = map(int, sums)
    return first**2 == size * first_squares and second**2 == size * second_squares
