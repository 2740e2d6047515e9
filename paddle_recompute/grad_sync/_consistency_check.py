"""What the ranks tell each other at the end of each step, in one small collective.

Fourteen numbers of the hosts are summed: what has happened to the gradients, how many examples
there were, a fingerprint of what must be the same everywhere, whether a rank has given up a Program
or was asked to stop. The loss is sent with them; on a device in a collective of its own, which no
host waits for. Where all goes well, nothing is listed by rank, and nothing goes through rank 0;
where the fingerprint differs, the ranks meet there and compare what they have.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import paddle
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle import device
from paddle_recompute.distributed import (
    agree_on_options,
    are_equal,
    collective_fallback,
    fingerprint,
    reduce_numbers,
    scope_of,
    stop_request,
    values_of_ranks,
)
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync._all_reduce import LANE, AllReducer
from paddle_recompute.grad_sync._parameters import ParameterList, agree_on_trained
from paddle_recompute.grad_sync._start import StartValues

_num_made: Counter[tuple[int, ...]] = Counter()
"""How many of each group of ranks, which make them in the same order."""


class StepFlags(NamedTuple):
    """What has happened on some rank."""

    misfit: bool = False
    """A gradient was added to after it was sent, or has no place in a bucket."""
    changed_by_hand: bool = False
    """A gradient was changed by hand after it was sent."""
    missing: bool = False
    """A parameter that has a place in a bucket has no gradient."""


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

    def loss_on_host(self) -> tuple[float, float]:
        """The loss, added up in the order of `losses`, and `count` times that."""
        losses = [loss.item() for loss in self.losses]
        total = functools.reduce(operator.add, losses) if losses else 0.0  # sum() compensates
        # Infinities of both signs on two ranks have no mean.
        total = math.nan if total == -math.inf else total
        return total, total * (self.count or 1.0)

    @paddle.no_grad()
    def loss(self) -> paddle.Tensor:
        """The same on the device: float64, ``[2]``."""
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
        loss: Mean over all examples; float64, ``[1]``, on the device. None: none was reported here.
    """

    count: float
    counts_differ: bool
    loss: paddle.Tensor | None


class ConsistencyCheck:
    """The small collective of one `GradientSync`.

    Args:
        parameters: Which of them take part must be the same everywhere.
        group: The ranks; None is all of them.
        all_reducer: Takes the loss on a device.
        start: What is compared in the first step.
    """

    def __init__(
        self,
        parameters: ParameterList,
        group: Group | None,
        all_reducer: AllReducer,
        start: StartValues,
    ) -> None:
        self._parameters = parameters
        self._start = start
        self._group = group
        self._scope = scope_of(group)
        self._all_reducer = all_reducer
        _num_made[self._scope.ranks] += 1
        self._number = _num_made[self._scope.ranks]
        collective_fallback.tell_with(self)

    def reach(
        self, own: StepFlags, report: StepReport, label: Callable[[str], str]
    ) -> tuple[StepFlags, Agreed]:
        """What has happened on any rank, and the means.

        Raises:
            SyncError: The ranks do not train the same, or what `report` says must be the same is
                not; the message names what differs.
        """
        count, size = report.count or 0.0, len(self._scope.ranks)
        numbers = [
            *map(float, own),
            *fingerprint(self._terms(report)),
            *fingerprint(float(count).hex()),
            count,
            collective_fallback.has_fallen_back(),
            stop_request.asked() if self._group is None else 0.0,
        ]
        what = label("end of the backward")
        if self._all_reducer.is_gloo:
            *sums, mean, weighted = self.sums([*numbers, *report.loss_on_host()], what)
            loss = device.put([mean, weighted], "float64") if report.losses else None
        else:
            loss = report.loss()
            self._all_reducer.send(loss, what).wait()
            sums = self.sums(numbers, what)
        flags, total = StepFlags(*(flag > 0 for flag in sums[:3])), sums[11]
        if not are_equal(sums[3:7], size):
            self._explain(report)
        self._start.end()
        differ = not are_equal(sums[7:11], size)
        if sums[12] > 0:
            collective_fallback.follow()
        stop_request.hear_asked(sums[13])
        if loss is not None:
            with paddle.no_grad():
                loss = loss[1:] / total if differ else loss[:1] / size
        return flags, Agreed(total / size, differ, loss)

    def weight_of(self, count: float, label: str) -> float:
        """`count` relative to the mean over the ranks; 1 to the bit where all are the same."""
        *sums, total = self.sums([*fingerprint(float(count).hex()), count], label)
        size = len(self._scope.ranks)
        return 1.0 if are_equal(sums, size) else count / (total / size)

    def sums(self, numbers: Sequence[float], label: str) -> list[float]:
        """The sum over the ranks of each of `numbers`."""
        return reduce_numbers(numbers, "sum", label, self._group, lane=LANE)

    def largest(self, numbers: Sequence[float], label: str) -> list[int]:
        """The largest over the ranks of each of `numbers`, which are whole."""
        largest = reduce_numbers(numbers, "max", label, self._group, lane=LANE)
        return [int(number) for number in largest]

    def without_gradient(self, label: str) -> frozenset[int]:
        """The parameters that have a gradient on no rank."""
        present = [gradient is not None for gradient in self._parameters.gradients]
        anywhere = self.largest(present, label)
        return frozenset(index for index, there in enumerate(anywhere) if not there)

    def _terms(self, report: StepReport) -> str:
        told = json.dumps(dict(report.terms), sort_keys=True)
        start = self._start.digest()
        return f"{self._number} {self._parameters.digest} {start} {report.count is None} {told}"

    def _explain(self, report: StepReport) -> None:
        numbers = values_of_ranks(self._number, "which GradientSync", self._group)
        if len({*numbers}) > 1:
            raise SyncError(
                "the ranks are in last_backward() of different GradientSyncs: by rank, of number "
                f"{', '.join(map(str, numbers))} in the order in which they were made. Every rank "
                "must call them in the same order"
            )
        agree_on_trained(self._parameters, self._scope)
        is_written_somewhere = self._start.explain(self._scope)
        agree_on_options(report.terms, self._scope, of="TrainStep was called")
        if is_written_somewhere:
            return
        raise SyncError(
            "the ranks do not do the same in this step: some call GradientSync through TrainStep, "
            "others not, or in another way"
        )
