"""Bucketed all-reduce of gradients, while the backward is still running or after it.

A hook on each parameter counts how often its gradient was added to. In the first step nothing is
sent early: the counts and the order in which gradients became ready are learnt, and the ranks agree
on them ("order prediction", Li et al. 2020, arXiv:2006.15704, section 6). From then on a bucket is
sent as soon as every member was added to as often as expected; always in the agreed order, so the
ranks cannot meet in different buckets. What was not sent when the backward ends is sent then.

Recompute needs no special case: with saved-tensor hooks a parameter's hook fires once per backward,
in the PyLayer form once per recomputed call, and the count that was learnt says which.

Whether buckets are sent early or all at the end, they are the same buckets: gloo's ring adds up the
ranks in an order that depends on the place in the buffer, so with more than two ranks another
layout would round differently.

The ``.grad`` of a parameter keeps this rank's own gradient until everything has arrived. So when a
gradient is added to after its bucket was sent (the graph has changed), nothing is lost: all ranks
send everything again, and learn anew.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import paddle
from paddle.distributed.communication.group import Group

from paddle_recompute import _paddle
from paddle_recompute.distributed import Scope, exchange_long, peers
from paddle_recompute.grad_sync._all_reduce import Courier, Delivery, courier_of
from paddle_recompute.grad_sync._buckets import Bucket, plan_buckets
from paddle_recompute.grad_sync._compression import Wire
from paddle_recompute.grad_sync._timeline import BucketTimes, Timeline

_logger = logging.getLogger("paddle_recompute")


class BucketedReduction:
    """The mean over the ranks of the gradients of `parameters`, one call of `finish` per step."""

    def __init__(
        self,
        parameters: Sequence[paddle.Tensor],
        names: Sequence[str],
        group: Group | None,
        scope: Scope,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        wire: Wire,
        early: bool,
        always_exchange_presence: bool,
    ) -> None:
        self._parameters = list(parameters)
        self._names = list(names)
        self._scope = scope
        self._sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
        self._wire = wire
        self._early = early
        self._always_exchange_presence = always_exchange_presence
        self._expected: list[int] | None = None
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, int] = {}
        self._courier: Courier = courier_of(group, scope)
        for index, parameter in enumerate(self._parameters):
            _call_on_addition(parameter, weakref.WeakMethod(self._gradient_added), index)
        self._armed = False
        self._warned = False
        self.num_early = 0
        """Buckets that the last step sent before its backward had ended."""
        self.timeline: Timeline | None = None
        """The last step's times."""

    def arm(self, step: int) -> None:
        """The backward that follows is the last one before the optimizer's step number `step`."""
        self._step = step
        self._wire.begin()
        self._began = time.perf_counter()
        self._first_gradient: float | None = None
        self._queued: list[tuple[float, int]] = []
        self._counts = [0] * len(self._parameters)
        self._order: list[int] = []
        self._late: list[int] = []
        self._next = 0
        self._flats: list[paddle.Tensor] = []
        self._deliveries: list[Delivery] = []
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._armed = True

    def disarm(self) -> None:
        """The backward failed."""
        self._armed = False

    def finish(self) -> None:
        """Send what is left, wait for everything, and write the means into ``.grad``."""
        self._armed = False
        backward_ended = time.perf_counter()
        self.num_early = self._next
        relearn = self._expected is None
        if relearn:
            self._learn()
        self._send_rest()
        missing = [i for i in self._bucket_of if self._parameters[i].grad is None]
        late, missing_somewhere = self._agree(bool(self._late), bool(missing))
        self._warn_of_missing(missing)
        self._wait()
        if late:
            self._repeat_and_relearn()
        nowhere = frozenset[int]()
        if late or missing_somewhere or self._always_exchange_presence:
            nowhere = self._without_gradient_anywhere()
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            bucket.split_into(self._parameters, flat, nowhere)
        self._wire.commit()
        self.timeline = self._timeline(backward_ended)
        self._flats, self._deliveries = [], []

    def residuals(self) -> dict[int, paddle.Tensor]:
        """What rounding still owes each parameter, by index; flat tensors."""
        return self._wire.residuals()

    def set_residuals(self, residuals: Mapping[int, paddle.Tensor]) -> None:
        """Owe this, and nothing else."""
        self._wire.set_residuals(residuals)

    # ------------------------------------------------------------------------------ sending

    def _gradient_added(self, index: int) -> None:
        """A backward has added to the gradient of parameter `index`; called by its hook."""
        if not self._armed:
            return
        self._counts[index] += 1
        if self._first_gradient is None:
            self._first_gradient = time.perf_counter()
        if self._expected is None:
            self._order.append(index)
            return
        bucket = self._bucket_of.get(index, -1)  # -1: had no gradient on any rank so far
        if bucket < self._next or self._counts[index] > self._expected[index]:
            self._late.append(index)
        elif self._counts[index] == self._expected[index]:
            self._missing[bucket] -= 1
            while self._early and self._next < len(self._buckets) and not self._missing[self._next]:
                self._send_next()

    @paddle.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        flat = bucket.join(self._parameters, 1.0 / len(self._scope.ranks))
        wire = self._wire.encode(flat, bucket)
        self._flats.append(wire)
        self._queued.append((time.perf_counter(), int(wire.size) * wire.element_size()))
        label = f"bucket {self._next} of {len(self._buckets)} of step {self._step}"
        self._deliveries.append(self._courier.send(wire, label, self._scope))
        self._next += 1

    def _send_rest(self) -> None:
        while self._next < len(self._buckets):
            self._send_next()

    @paddle.no_grad()
    def _wait(self) -> None:
        for delivery in self._deliveries:
            delivery.wait()
        self._flats = [
            self._wire.decode(flat, self._parameters[bucket.members[0]].dtype)
            for bucket, flat in zip(self._buckets, self._flats, strict=True)
        ]

    def _timeline(self, backward_ended: float) -> Timeline:
        sent = zip(self._queued, self._deliveries, strict=True)
        return Timeline(
            began=self._began,
            first_gradient=self._first_gradient,
            backward_ended=backward_ended,
            ended=time.perf_counter(),
            buckets=tuple(
                BucketTimes(number, num_bytes, queued, delivery.started, delivery.ended)
                for number, ((queued, num_bytes), delivery) in enumerate(sent)
            ),
        )

    # ----------------------------------------------------------------------------- agreeing

    def _learn(self) -> None:
        """Agree on how often each gradient is added to, and in which order they become ready."""
        last = {index: position for position, index in enumerate(self._order)}
        # A gradient that did not come goes to the end, later parameters first.
        ready = sorted(
            range(len(self._parameters)), key=lambda i: (last.get(i, len(self._order)), -i)
        )
        learnt = exchange_long(
            [self._counts, ready], self._label("order of gradients"), self._scope
        )
        counts, orders = zip(*learnt, strict=True)
        self._expected = [max(count) for count in zip(*counts, strict=True)]
        self._plan([index for index in orders[0] if self._expected[index]])

    def _plan(self, order: list[int]) -> None:
        self._buckets = plan_buckets(self._parameters, order, **self._sizes)
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket.members}
        self._wire.plan(self._buckets)

    def _agree(self, late: bool, missing: bool) -> tuple[bool, bool]:
        """Whether, on any rank, a gradient came late, and one that is planned is missing."""
        label = self._label("end of the backward")
        told = peers().exchange([late, missing], label, self._scope)
        return any(late for late, _ in told), any(missing for _, missing in told)

    def _without_gradient_anywhere(self) -> frozenset[int]:
        present = "".join("01"[p.grad is not None] for p in self._parameters)
        told = exchange_long(present, self._label("which gradients there are"), self._scope)
        return frozenset(i for i, flags in enumerate(zip(*told, strict=True)) if "1" not in flags)

    def _label(self, what: str) -> str:
        return f"gradient sync of step {self._step}: {what}"

    def _repeat_and_relearn(self) -> None:
        """Send every bucket again, from gradients that are complete now; learn in the next step."""
        if self._late:
            _logger.warning(
                "gradient sync: '%s' got a gradient after its bucket was sent: the graph is not "
                "that of the step before. All gradients are sent again in this step (exact, but "
                "serial), and the order is learnt anew.",
                self._names[self._late[0]],
            )
        self._next, self._flats, self._deliveries, self._queued = 0, [], [], []
        self._wire.begin()
        planned = list(self._bucket_of)
        others = [i for i in range(len(self._parameters)) if i not in self._bucket_of]
        self._plan([*planned, *others])
        self._send_rest()
        self._wait()
        self._expected = None

    def _warn_of_missing(self, missing: list[int]) -> None:
        if missing and not self._always_exchange_presence and not self._warned:
            self._warned = True
            _logger.warning(
                "gradient sync: '%s' has no gradient in this step although it had one before; it "
                "counts as zero if another rank has one. With graphs that change, set "
                "find_unused_parameters=True to be spared this message.",
                self._names[missing[0]],
            )


def _call_on_addition(
    parameter: paddle.Tensor, method: weakref.WeakMethod[Callable[[int], None]], index: int
) -> None:
    """Call ``method(index)`` after each addition to the gradient, while its owner lives."""

    def added() -> None:
        call = method()
        if call is not None:
            call(index)

    _paddle.on_gradient_added(parameter, added)
