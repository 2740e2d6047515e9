"""Bucketed all-reduce of gradients, while the backward is still running or after it.

A hook on each parameter counts how often its gradient was added to. In the first step nothing is
sent early: its counts, and the order in which gradients became ready, are what all ranks agree on
("order prediction", Li et al. 2020, arXiv:2006.15704, section 6). From then on a bucket is sent as
soon as every member was added to as often as expected; always in the agreed order, so the ranks
cannot meet in different buckets. What was not sent when the backward ends is sent then.

Recompute needs no special case: with saved-tensor hooks a parameter's hook fires once per backward,
in the PyLayer form once per recomputed call, and the count that was learnt says which.

Whether buckets are sent early or all at the end, they are the same buckets: gloo's ring adds up the
ranks in an order that depends on the place in the buffer, so with more than two ranks another
layout would round differently.

What has a ``.grad`` when the backward ends is part of it, whoever made it. That keeps this rank's
own gradient until everything has arrived. So there is one recovery for whatever does not fit what
was sent: a gradient that was added to after its bucket was sent (the graph has changed), was
changed by hand, or has no place in a bucket (as all of them in the first step); examples whose
numbers differ between the ranks. The ranks learn the order anew and send everything, once.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from functools import partial
from typing import Any, NamedTuple

import paddle
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.backward import watch_backward
from paddle_recompute._paddle.gradients import make_unscaling_visible, on_gradient_added
from paddle_recompute.distributed import peers, scope_of
from paddle_recompute.grad_sync._agreement import Agreed, Agreement, StepFlags, StepReport
from paddle_recompute.grad_sync._all_reduce import AllReducer, AllReduceTask
from paddle_recompute.grad_sync._buckets import Bucket, plan_buckets
from paddle_recompute.grad_sync._codec import Codec
from paddle_recompute.grad_sync._parameters import ParameterList, refuse_main_grad
from paddle_recompute.grad_sync._sent import SentGradients
from paddle_recompute.grad_sync._timeline import BucketTimes, Timeline

_PRESENCE = "which gradients there are"
_logger = logging.getLogger("paddle_recompute")


class _Sending(NamedTuple):
    """A bucket under way."""

    bucket: Bucket
    flat: paddle.Tensor
    queued: float
    task: AllReduceTask

    def times(self, number: int) -> BucketTimes:
        """When it was sent, as the one with this `number`."""
        num_bytes = int(self.flat.size) * self.flat.element_size()
        return BucketTimes(number, num_bytes, self.queued, self.task.started, self.task.ended)


class _Arrivals:
    """Which gradients of a step are still to come: all that the hooks of parameters know.

    Of each addition to a gradient it takes one call; the `reduction` is told when a bucket is
    complete, and of an addition too many. The hooks may outlive the reduction.

    Attributes:
        armed: Whether the backward that runs is the last one of its step.
        order: The parameters, as they were added to.
        left: How often each parameter is still to be added to.
        unseen: Of each bucket, how many gradients are not complete yet.
        first: When the first addition came (``time.perf_counter``).
    """

    def __init__(self, reduction: BucketedReduction) -> None:
        self._reduction = weakref.ref(reduction)
        self.armed = False
        self.begin([], {}, [])

    def begin(self, left: list[int], bucket_of: dict[int, int], unseen: list[int]) -> None:
        """A step begins."""
        self.order: list[int] = []
        self.first: float | None = None
        self.left, self.unseen, self._bucket_of = left, unseen, bucket_of

    def added(self, index: int) -> None:
        """A backward has added to the gradient of parameter `index`."""
        if not self.armed:
            return
        if not self.order:
            self.first = time.perf_counter()
        self.order.append(index)
        left = self.left[index] = self.left[index] - 1
        if not left:
            bucket = self._bucket_of[index]
            self.unseen[bucket] -= 1
            if not self.unseen[bucket]:
                self._tell(None)
        elif left < 0:
            self._tell(index)

    def _tell(self, index: int | None) -> None:
        alive = self._reduction()
        if alive is not None:
            alive.arrived(index)


class BucketedReduction:
    """The mean over the ranks of the gradients of `listed`, one call of `finish` per step."""

    def __init__(
        self,
        listed: ParameterList,
        group: Group | None,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        codec: Codec,
        early: bool,
        expects_unused: bool,
    ) -> None:
        self._listed = listed
        self._parameters = listed.parameters  # grows with it
        self._ranks = scope_of(group).ranks
        self._sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
        self._early = early
        self._warns_of_unused = not expects_unused
        self._codec = codec
        self._all_reducer = AllReducer(group)
        self._agreement = Agreement(listed, group, self._all_reducer)
        self._expected: dict[int, int] = {}
        """How often the last backward adds to each gradient."""
        self._buckets: list[Bucket] = []
        """In the order in which they are sent; none before the first step has ended."""
        self._bucket_of: dict[int, int] = {}
        self._left: list[int] = []
        self._unseen: list[int] = []
        """What `_Arrivals` begins a step with."""
        self._arrivals = _Arrivals(self)
        if early:
            watch_backward()
            make_unscaling_visible()
        self._hooked: set[int] = set()
        self._call_on_additions()
        self._under_way: list[_Sending] = []
        self._steps_unchanged = 0
        self._counts_differ = False
        """Whether the ranks had different numbers of examples in the last step. Then they tell each
        other before the next backward, as otherwise everything would have to be sent twice.
        """
        self.num_early = 0
        """Buckets that the last step sent before its backward had ended."""
        self.timeline: Timeline | None = None
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
            self._weight = self._agreement.weight_of(report.count, label)
        self._began = time.perf_counter()
        self._late: int | None = None
        unknown = [0] * (len(self._parameters) - len(self._left))
        self._arrivals.begin([*self._left, *unknown], self._bucket_of, [*self._unseen])
        self._sent = SentGradients()
        self._begin_sending()
        self._arrivals.armed = True

    def arrived(self, index: int | None) -> None:
        """A bucket is complete; or parameter `index` was added to more often than expected."""
        if index is None:
            while self._early and self._is_next_complete():
                self._send_next()
        elif not self._buckets:
            if self._early:
                self._sent.expect_end(index, self._parameters)
        elif self._bucket_of.get(index, len(self._under_way)) < len(self._under_way):
            self._late = index
            self._sent.forget(index)

    def _is_next_complete(self) -> bool:
        place = len(self._under_way)
        return place < len(self._buckets) and not self._arrivals.unseen[place]

    @paddle.no_grad()
    def finish(self, report: StepReport) -> Agreed:
        """Send what is left, wait for everything, and write the means into ``.grad``.

        In a step that goes well the ranks agree in one small collective, behind the buckets.
        """
        self._arrivals.armed = False
        backward_ended = time.perf_counter()
        self.num_early = len(self._under_way)
        changed = self._listed.read()
        self._call_on_additions()
        self._send_rest()
        own = self._flags()
        flags, agreed = self._agreement.reach(own, report, self._label)
        self._wait()
        if flags.changed_by_hand:
            self._stop_sending_early()
        self._counts_differ = agreed.counts_differ
        is_unweighted = agreed.counts_differ and self._weight is None
        if is_unweighted:
            self._weight = (report.count or 0.0) / agreed.count
        without_gradient: frozenset[int] = frozenset()
        if flags.misfit or flags.changed_by_hand or is_unweighted or self._has_long_frozen(changed):
            without_gradient = self._learn()
            self._begin_sending()
            self._send_rest()
            self._wait()
        elif flags.missing:
            without_gradient = self._agreement.without_gradient(self._label(_PRESENCE))
        times = tuple(one.times(number) for number, one in enumerate(self._under_way))
        self._sent = SentGradients()
        for _ in times:  # a bucket is free when the next one is written
            self._write(self._under_way.pop(0), without_gradient)
        self._codec.commit(without_gradient)
        first, ended = self._arrivals.first, time.perf_counter()
        self.timeline = Timeline(self._began, first, backward_ended, ended, times)
        return agreed

    def disarm(self) -> None:
        """The backward failed."""
        self._arrivals.armed = False

    # ------------------------------------------------------------------------------ sending

    def _call_on_additions(self) -> None:
        for index in self._listed.trained:
            parameter = self._parameters[index]
            # Paddle refuses a hook on what is frozen, though it may still have a gradient.
            if index in self._hooked or parameter.stop_gradient:
                continue
            refuse_main_grad(parameter, self._listed.names[index])
            on_gradient_added(parameter, partial(self._arrivals.added, index))
            self._hooked.add(index)

    def _begin_sending(self) -> None:
        self._codec.begin()
        self._under_way = []

    @paddle.no_grad()
    def _send_next(self) -> None:
        place = len(self._under_way)
        bucket = self._buckets[place]
        if self._arrivals.armed:  # from here on, they are not to change
            gradients = [self._parameters[index].grad for index in bucket.members]
            self._sent.add(bucket.members, gradients)
        else:
            gradients = [self._listed.gradients[index] for index in bucket.members]
        flat = bucket.join(gradients, self._dtype(bucket), self.scale)
        flat = self._codec.encode(flat, bucket)
        queued = time.perf_counter()
        label = self._label(f"bucket {place} of {len(self._buckets)}")
        task = self._all_reducer.send(flat, label)
        self._under_way.append(_Sending(bucket, flat, queued, task))

    def _send_rest(self) -> None:
        while len(self._under_way) < len(self._buckets):
            self._send_next()

    def _wait(self) -> None:
        for sending in self._under_way:
            sending.task.wait()

    def _dtype(self, bucket: Bucket) -> Any:
        return self._parameters[bucket.members[0]].dtype

    def _write(self, sending: _Sending, without_gradient: frozenset[int]) -> None:
        mean = self._codec.decode(sending.flat, self._dtype(sending.bucket))
        gradients = self._listed.gradients
        sending.bucket.split_into(self._parameters, gradients, mean, without_gradient)

    # ----------------------------------------------------------------------------- agreeing

    def _flags(self) -> StepFlags:
        """What has happened on this rank; says what the user should know of it."""
        names, gradients = self._listed.names, self._listed.gradients
        unplanned = [g for i, g in enumerate(gradients) if i not in self._bucket_of]
        is_unplanned = any(gradient is not None and gradient.size for gradient in unplanned)
        missing = [index for index in self._bucket_of if gradients[index] is None]
        if self._late is not None:
            _logger.warning(
                "gradient sync: '%s' got a gradient after its bucket was sent: the graph is not "
                "that of the step before. All gradients are sent again in this step (exact, but "
                "serial), and the order is learnt anew.",
                names[self._late],
            )
        trained = {*self._listed.trained}
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
            misfit=self._late is not None or is_unplanned,
            changed_by_hand=self._early and self._sent.is_changed(gradients),
            missing=bool(missing),
        )

    def _learn(self) -> frozenset[int]:
        """Agree on the buckets, from how often and in which order gradients were added to in this
        step; returns which parameters have a gradient on no rank.
        """
        without_gradient = self._agreement.without_gradient(self._label(_PRESENCE))
        size = len(self._parameters)
        arrived = self._arrivals.order
        last = {index: position for position, index in enumerate(arrived)}
        # A gradient that did not come goes to the end, later parameters first.
        order = sorted(range(size), key=lambda i: (last.get(i, len(arrived)), -i))
        is_first = peers().rank == self._ranks[0]  # whose order all take over
        learnt = self._agreement.largest(
            [*self._counts(), *(i * is_first for i in order)],
            self._label("order of gradients"),
        )
        self._expected.update((i, count) for i, count in enumerate(learnt[:size]) if count)
        # A parameter that has a place and is not used in this step may be in the next.
        known = self._bucket_of.keys() & {*self._listed.trained}
        planned = [i for i in learnt[size:] if i in known or i not in without_gradient]
        self._buckets = plan_buckets(self._parameters, planned, **self._sizes)
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket.members}
        self._left = [self._expected.get(i, 0) * (i in self._bucket_of) for i in range(size)]
        # A bucket waits for the end where no backward adds to a gradient, as if given by hand.
        self._unseen = [len(bucket.members) for bucket in self._buckets]
        return without_gradient

    def _counts(self) -> list[int]:
        """How often each parameter was added to in this step."""
        counted = Counter(self._arrivals.order)
        return [counted[index] for index in range(len(self._parameters))]

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
