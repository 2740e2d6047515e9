"""Bucketed all-reduce of gradients, while the backward is still running or after it.

A hook on each parameter appends its index to a list, in C. In the first step no bucket is sent
early: the ranks agree on how often each gradient is added to, and on the order in which gradients
become ready ("order prediction", Li et al. 2020, arXiv:2006.15704, section 6). From then on a
second hook, on the last parameter of each bucket, checks that every member was added to as often as
expected, and sends the bucket. Buckets are sent in the agreed order, so all ranks all-reduce the
same bucket. The rest is sent when the backward ends, before the ranks agree; with gloo all but the
last bucket, which is sent after the agreement.

Recompute needs no special case: with saved-tensor hooks a parameter's hook fires once per backward,
in the PyLayer form once per recomputed call, and the learned count includes that.

The buckets are the same, whether they are sent early or at the end: gloo's ring sums the ranks in
an order that depends on the position in the buffer, so with more than two ranks another layout
would round differently.

All gradients present at the end of the backward are averaged. ``.grad`` keeps this rank's own
gradient until all means have arrived. So there is one recovery if the sent buckets do not fit: a
gradient was added to after its bucket was sent (the graph has changed), was changed by hand, or is
in no bucket (as all gradients in the first step); or the numbers of examples differ between ranks.
Then the ranks learn the order again and send all gradients once more.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import compress, repeat
from operator import is_
from typing import Any, NamedTuple

import paddle
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.backward import after_each_backward, watch_backward
from paddle_recompute._paddle.flat import gradient_of
from paddle_recompute._paddle.gradients import (
    end_call,
    make_unscaling_visible,
    on_gradient_added,
)
from paddle_recompute.distributed import peers, scope_of
from paddle_recompute.grad_sync._all_reduce import AllReducer, AllReduceTask
from paddle_recompute.grad_sync._buckets import Bucket, plan_buckets
from paddle_recompute.grad_sync._communication_trace import BucketTimes, CommunicationTrace
from paddle_recompute.grad_sync._compression import GradientCompression
from paddle_recompute.grad_sync._consistency_check import (
    Agreed,
    ConsistencyCheck,
    StepFlags,
    StepReport,
)
from paddle_recompute.grad_sync._in_flight import InFlightGradients
from paddle_recompute.grad_sync._parameters import ParameterList, refuse_main_grad
from paddle_recompute.grad_sync._start import StartValues

_logger = logging.getLogger("paddle_recompute")


class _Sending(NamedTuple):
    """A bucket under way."""

    bucket: Bucket
    flat: paddle.Tensor
    queued: float
    task: AllReduceTask

    def times(self, number: int) -> BucketTimes:
        """When it was sent, as the one with this `number`."""
        num_bytes = self.flat.shape[0] * self.flat.element_size()
        return BucketTimes(number, num_bytes, self.queued, self.task.started, self.task.ended)


class _Order(list[int]):
    """The parameters, as backwards have added to their gradients."""

    is_read = False
    """Whether a step goes on; a backward of another thread may end meanwhile."""

    def clear_if_unread(self) -> None:
        if not self.is_read:
            self.clear()


def _let_go(forget: Callable[[], None], note: functools.partial[None]) -> None:
    forget()
    end_call(note)


class BucketedReduction:
    """The mean over the ranks of the gradients of `listed`, one call of `finish` per step."""

    def __init__(
        self,
        listed: ParameterList,
        group: Group | None,
        start: StartValues,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        compression: GradientCompression,
        early: bool,
        expects_unused: bool,
    ) -> None:
        self._listed = listed
        self._parameters = listed.parameters  # grows with it
        self._ranks = scope_of(group).ranks
        self._sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
        self._early = early
        self._warns_of_unused = not expects_unused
        self._compression = compression
        self._all_reducer = AllReducer(group)
        self._consistency_check = ConsistencyCheck(listed, group, self._all_reducer, start)
        self._expected: dict[int, int] = {}
        """How often the last backward adds to each gradient."""
        self._buckets: list[Bucket] = []
        """In the order in which they are sent; none before the first step has ended."""
        self._bucket_of: dict[int, int] = {}
        self._order = _Order()
        """Of this step's last backward."""
        self._usual: list[int] = []
        """The same of the step before."""
        self._ready: list[float] = []
        """By bucket: after how many additions of `_usual` it is complete."""
        self._armed = False
        self._hooked: set[int] = set()
        self._note = functools.partial(self._order.append)
        watch_backward()
        # Outside of a step the order is not read.
        forget = after_each_backward(self._order.clear_if_unread)
        weakref.finalize(self, _let_go, forget, self._note)  # Paddle's hooks outlive it
        if early:
            make_unscaling_visible()
        self._asking: set[int] = set()
        """The parameters whose hooks look for complete buckets."""
        self._call_on_additions()
        self._under_way: list[_Sending] = []
        self._steps_unchanged = 0
        self._end_reading: Callable[[], None] = lambda: None
        self._counts_differ = False
        """Whether the ranks had different numbers of examples in the last step. Then they tell each
        other before the next backward, as otherwise everything would have to be sent twice.
        """
        self.num_early = 0
        """Buckets that the last step sent before its backward had ended."""
        self.timeline: CommunicationTrace | None = None
        """The last step's times."""

    @property
    def scale(self) -> float:
        """What the gradients of this rank are multiplied by before they are summed up."""
        return (self._weight or 1.0) / len(self._ranks)

    def arm(self, step: int, report: StepReport) -> None:
        """The backward that follows is the last one before the optimizer's step number `step`."""
        self._step = step
        self._weight: float | None = None
        # What is offloaded is gone before `finish`, and cannot be sent again.
        if (self._counts_differ or self._listed.offloaded) and report.count is not None:
            label = self._label("number of examples")
            self._weight = self._consistency_check.weight_of(report.count, label)
        self._began = time.perf_counter()
        self._first: float | None = None
        self._sent = InFlightGradients()
        self._begin_sending()
        self._order.is_read = True
        self._order.clear()
        if self._early and not self._buckets:
            self._end_reading = after_each_backward(
                lambda: self._sent.read({*self._order}, self._parameters)
            )
        self._armed = True

    @staticmethod
    def _look(reduction: weakref.ref[BucketedReduction]) -> None:
        """A gradient is complete that is the last of a bucket, or the first of all."""
        alive = reduction()
        if alive is not None and alive._armed:
            alive._first = alive._first or time.perf_counter()
            while alive._early and alive._is_next_complete():
                alive._send_next()

    def _is_next_complete(self) -> bool:
        place, arrived = len(self._under_way), len(self._order)
        if place >= self._num_before_agreement:
            return False
        if self._order == self._usual[:arrived]:
            return arrived >= self._ready[place]
        counted = Counter(self._order)
        members = self._buckets[place].members
        return all(counted[i] >= self._expected.get(i, math.inf) for i in members)

    @paddle.no_grad()
    def finish(self, report: StepReport) -> Agreed:
        """Send what is left, agree, wait for everything, and write the means into ``.grad``.

        In a step that goes well the ranks agree in one small collective.
        """
        self._armed = False
        self._end_reading()
        backward_ended = time.perf_counter()
        self.num_early = len(self._under_way)
        changed = self._listed.read()
        if self._listed.is_new:
            self._call_on_additions()
        if self._early:  # other ranks may have sent more
            self._send_to(self._num_before_agreement)
        own = self._flags()
        flags, agreed = self._consistency_check.reach(own, report, self._label)
        if flags.changed_by_hand:
            self._stop_sending_early()
        self._counts_differ = agreed.counts_differ
        is_unweighted = agreed.counts_differ and self._weight is None
        if is_unweighted:
            self._weight = (report.count or 0.0) / agreed.count
        without_gradient: frozenset[int] = frozenset()
        if flags.misfit or flags.changed_by_hand or is_unweighted or self._has_long_frozen(changed):
            without_gradient = self._learn()
            self._wait()
            self._begin_sending()
        elif flags.missing:
            without_gradient = self._consistency_check.without_gradient(
                self._label("which gradients there are")
            )
        if self._order != self._usual:
            self._expect_order()
        self._send_to(len(self._buckets), has_met=True)
        self._wait()
        times = tuple(bucket.times(number) for number, bucket in enumerate(self._under_way))
        self._sent = InFlightGradients()
        for _ in times:  # a bucket is free when the next one is written
            self._write(self._under_way.pop(0), without_gradient)
        self._compression.commit(without_gradient)
        ended = time.perf_counter()
        self.timeline = CommunicationTrace(self._began, self._first, backward_ended, ended, times)
        self.disarm()
        return agreed

    def disarm(self) -> None:
        """The step has ended, or failed."""
        self._armed = self._order.is_read = False
        self._end_reading()
        self._listed.gradients = []  # whoever clears `.grad` frees them

    # ------------------------------------------------------------------------------ sending

    def _call_on_additions(self) -> None:
        for index in self._listed.trained:
            parameter = self._parameters[index]
            if index in self._hooked:
                continue
            refuse_main_grad(parameter, self._listed.names[index])
            self._hooked.add(index)
            # A method of the index is one small object: what a hook has of its own is in no cache.
            on_gradient_added(parameter, types.MethodType(self._note, index))

    def _expect_order(self) -> None:
        """Take the order of this step for that of the next: let the last gradient of each bucket
        look whether the bucket is complete.
        """
        self._usual = [*self._order]
        last = {index: position for position, index in enumerate(self._usual)}
        counted = Counter(self._usual)
        self._ready = []
        for bucket in self._buckets:
            # It waits for the end where a gradient came less often than expected, or by hand.
            is_whole = all(0 < self._expected.get(i, 0) <= counted[i] for i in bucket.members)
            ready = 1 + max(last[i] for i in bucket.members) if is_whole else math.inf
            self._ready.append(max([ready, *self._ready[-1:]]))
        asking = {self._usual[int(ready) - 1] for ready in self._ready if ready < math.inf}
        for index in asking.union(self._usual[:1]) - self._asking:
            self._asking.add(index)
            look = functools.partial(self._look, weakref.ref(self))
            on_gradient_added(self._parameters[index], look)

    def _begin_sending(self) -> None:
        self._compression.begin()
        self._under_way = []

    @property
    def _num_before_agreement(self) -> int:
        """How many buckets are sent before the ranks agree, where buckets are sent early."""
        return max(len(self._buckets) - int(self._all_reducer.is_gloo), 0)

    def _send_to(self, end: int, *, has_met: bool = False) -> None:
        while len(self._under_way) < end:
            self._send_next(has_met=has_met)

    @paddle.no_grad()
    def _send_next(self, *, has_met: bool = False) -> None:
        place = len(self._under_way)
        bucket = self._buckets[place]
        if self._armed:  # from here on, they are not to change
            members = map(self._parameters.__getitem__, bucket.members)
            gradients = [*map(gradient_of, members)]
            self._sent.add(bucket.members, gradients, len(self._order))
        else:
            gradients = [*map(self._listed.gradients.__getitem__, bucket.members)]
        flat = bucket.join(gradients, self._dtype(bucket), self.scale)
        flat = self._compression.encode(flat, bucket)
        queued = time.perf_counter()
        label = self._label(f"bucket {place} of {len(self._buckets)}")
        task = self._all_reducer.send(flat, label, has_met=has_met)
        self._under_way.append(_Sending(bucket, flat, queued, task))

    def _wait(self) -> None:
        for sending in self._under_way:
            sending.task.wait()

    def _dtype(self, bucket: Bucket) -> Any:
        return self._parameters[bucket.members[0]].dtype

    def _write(self, sending: _Sending, without_gradient: frozenset[int]) -> None:
        mean = self._compression.decode(sending.flat, self._dtype(sending.bucket))
        gradients = self._listed.gradients
        sending.bucket.split_into(self._parameters, gradients, mean, without_gradient)

    # ----------------------------------------------------------------------------- agreeing

    def _flags(self) -> StepFlags:
        """What has happened on this rank; says what the user should know of it."""
        names, gradients = self._listed.names, self._listed.gradients
        planned = self._bucket_of
        missing = [*compress(planned, map(is_, map(gradients.__getitem__, planned), repeat(None)))]
        is_unplanned = len(planned) < len(gradients) and any(
            gradient is not None and gradient.size
            for i, gradient in enumerate(gradients)
            if i not in planned
        )
        late = self._sent.late(self._order) if self._order != self._usual else None
        if late is not None:
            _logger.warning(
                "gradient sync: '%s' got a gradient after its bucket was sent: the graph is not "
                "that of the step before. All gradients are sent again in this step (exact, but "
                "serial), and the order is learnt anew.",
                names[late],
            )
        trained = {*self._listed.trained} if missing else ()
        unused = [index for index in missing if index in trained]  # what is frozen has none
        if unused and self._warns_of_unused:
            self._warns_of_unused = False
            _logger.warning(
                "gradient sync: '%s' has no gradient in this step although it had one before; it "
                "counts as zero if another rank has one. With graphs that change, set "
                "find_unused_parameters=True to be spared this message.",
                names[unused[0]],
            )
        return StepFlags(
            misfit=late is not None or is_unplanned,
            # A change that comes with a late gradient is sent with it.
            changed_by_hand=self._early and late is None and self._sent.is_changed(gradients),
            missing=bool(missing),
        )

    def _learn(self) -> frozenset[int]:
        """Agree on the buckets, from the order in which gradients became complete in this step;
        returns which parameters have a gradient on no rank.
        """
        size, arrived = len(self._parameters), self._order
        self._expected.update(Counter(arrived))
        last = {index: position for position, index in enumerate(arrived)}
        # A gradient that did not come goes to the end, later parameters first.
        order = sorted(range(size), key=lambda i: (last.get(i, len(arrived)), -i))
        is_first = peers().rank == self._ranks[0]  # whose order all take over
        present = [gradient is not None for gradient in self._listed.gradients]
        learnt = self._consistency_check.largest(
            [*present, *(i * is_first for i in order)], self._label("order of gradients")
        )
        without_gradient = frozenset(i for i in range(size) if not learnt[i])
        # A parameter that has a place and is not used in this step may be in the next.
        known = self._bucket_of.keys() & {*self._listed.trained}
        planned = [i for i in learnt[size:] if i in known or i not in without_gradient]
        self._buckets = plan_buckets(self._parameters, planned, **self._sizes)
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket.members}
        self._expect_order()
        return without_gradient

    def _has_long_frozen(self, changed: bool) -> bool:
        """Whether buckets have parameters that are not trained any more, not only in turn."""
        self._steps_unchanged = 0 if changed else self._steps_unchanged + 1
        return self._steps_unchanged == 2 and not self._bucket_of.keys() <= {*self._listed.trained}

    def _stop_sending_early(self) -> None:
        self._early = False
        _logger.warning(
            "gradient sync: gradients were changed by hand inside of last_backward(), such as by "
            "unscaling or clipping. The change is kept: from now on nothing is sent while the "
            "backward runs, as with mode 'fused'. To have both, change gradients after "
            "last_backward(), when they are the mean over the ranks."
        )

    def _label(self, what: str) -> str:
        return f"gradient sync of step {self._step}: {what}"
