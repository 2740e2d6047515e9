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

What has a ``.grad`` when the backward ends is part of it, whoever made it: a parameter that an
earlier backward used, or that was frozen or did not exist when the order was learnt, is not in any
bucket. Then a rank says so at the end, the ranks send what they have besides, and learn anew.

The ``.grad`` of a parameter keeps this rank's own gradient until everything has arrived. So when a
gradient is added to after its bucket was sent (the graph has changed), or changed by hand,
nothing is lost: all ranks send everything again. So they do where the numbers of their examples
turn out to differ.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping

import paddle
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.backward import watch_backward
from paddle_recompute._paddle.gradients import make_unscaling_visible, on_gradient_added
from paddle_recompute.distributed import Scope, peers
from paddle_recompute.grad_sync._agreement import Agreed, Agreement, StepReport, Told
from paddle_recompute.grad_sync._all_reduce import AllReducer, AllReduceTask, all_reducer_of
from paddle_recompute.grad_sync._buckets import Bucket, plan_buckets
from paddle_recompute.grad_sync._codec import Codec
from paddle_recompute.grad_sync._roll import Roll, refuse_main_grad
from paddle_recompute.grad_sync._sent import SentGradients
from paddle_recompute.grad_sync._timeline import BucketTimes, Timeline

_logger = logging.getLogger("paddle_recompute")


class BucketedReduction:
    """The mean over the ranks of the gradients of `roll`, one call of `finish` per step."""

    def __init__(
        self,
        roll: Roll,
        group: Group | None,
        scope: Scope,
        *,
        bucket_bytes: int,
        first_bucket_bytes: int,
        wire: Codec,
        early: bool,
        always_exchange_presence: bool,
    ) -> None:
        self._roll = roll
        self._parameters = roll.parameters  # grows with it
        self._scope = scope
        self._sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
        self._codec = wire
        self._early = early
        self._always_exchange_presence = always_exchange_presence
        self._expected: list[int] | None = None
        """How often the last backward adds to each gradient; None: to be learnt."""
        self._usual: dict[int, int] = {}  # the same, of parameters that one learning did not see
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, int] = {}
        self._all_reducer: AllReducer = all_reducer_of(group, scope)
        self._agreement = Agreement(roll, scope, self._all_reducer)
        if early:
            watch_backward()
            make_unscaling_visible()
        self._hooked: set[int] = set()
        self._call_on_additions()
        self._armed = False
        self._warned = False
        self._steps_unchanged = 0
        self._counts_differ = False
        """Whether the ranks had different numbers of examples in the last step. Then they tell each
        other before the next backward, as otherwise everything would have to be sent twice.
        """
        self.num_early = 0
        """Buckets that the last step sent before its backward had ended."""
        self.timeline: Timeline | None = None
        """The last step's times."""

    def arm(self, step: int, report: StepReport) -> None:
        """The backward that follows is the last one before the optimizer's step number `step`."""
        self._step = step
        self._weight: float | None = None
        if self._counts_differ and report.count is not None:
            label = self._label("number of examples")
            self._weight = self._agreement.weight_of(report.count, label)
        self._codec.begin()
        self._began = time.perf_counter()
        self._first_gradient: float | None = None
        self._queued: list[tuple[float, int]] = []
        self._counts = [0] * len(self._parameters)
        self._order: list[int] = []
        self._late: list[int] = []
        self._next = 0
        self._flats: list[paddle.Tensor] = []
        self._tasks: list[AllReduceTask] = []
        self._num_arrived = 0
        self._sent = SentGradients()
        expected = self._expected or []
        self._missing = [
            sum(bool(expected[index]) for index in bucket.members) if expected else 0
            for bucket in self._buckets
        ]
        self._armed = True

    def disarm(self) -> None:
        """The backward failed."""
        self._armed = False

    def finish(self, report: StepReport) -> Agreed:
        """Send what is left, wait for everything, and write the means into ``.grad``.

        In a step that goes well the ranks agree in one small collective, behind the buckets.
        """
        self._armed = False
        backward_ended = time.perf_counter()
        self.num_early = self._next
        changed = self._roll.read()
        self._call_on_additions()
        gradients = self._roll.gradients
        learns = self._expected is None
        if learns:
            self._learn()
            changed = False
        self._send_rest()
        missing = [i for i in self._bucket_of if gradients[i] is None]
        own = Told(
            late=bool(self._late),
            touched=self._early and self._sent.is_changed(gradients),
            changed=changed,
            missing=bool(missing),
            besides=any(
                g is not None and i not in self._bucket_of and g.size
                for i, g in enumerate(gradients)
            ),
            more=self._got_more_than_expected(),
        )
        told, agreed = self._agreement.reach(own, report, self._label)
        self._warn_of_missing(missing)
        self._wait()
        nowhere = frozenset[int]()
        if told.concerns_presence or self._always_exchange_presence:
            nowhere = self._without_gradient_anywhere()
        if told.touched:
            self._stop_sending_early()
        was_weighted = self._weight is not None
        self._counts_differ = agreed.counts_differ
        if agreed.counts_differ and report.count is not None:
            self._weight = report.count / agreed.count
        if told.late or (told.touched and not learns):
            self._plan([*self._bucket_of, *self._besides(nowhere)])
            self._repeat()
        elif agreed.counts_differ and not was_weighted:
            if told.besides:
                self._add_buckets(nowhere)
            self._repeat()
        elif told.besides:
            self._add_buckets(nowhere)
            self._send_rest()
            self._wait()
        if told.late or told.besides or told.more or self._has_long_frozen(told.changed):
            self._expected = None
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            bucket.split_into(self._parameters, flat, nowhere)
        self._codec.commit(nowhere)
        self.timeline = self._timeline(backward_ended)
        self._flats, self._tasks, self._sent = [], [], SentGradients()
        return agreed

    def residuals(self) -> dict[int, paddle.Tensor]:
        """The accumulated rounding error of each parameter, by index; flat tensors."""
        return self._codec.residuals()

    def set_residuals(self, residuals: Mapping[int, paddle.Tensor]) -> None:
        """Replace all accumulated rounding errors."""
        self._codec.set_residuals(residuals)

    # ------------------------------------------------------------------------------ sending

    def _call_on_additions(self) -> None:
        for index in self._roll.trained:
            parameter = self._parameters[index]
            # Paddle refuses a hook on what is frozen, though it may still have a gradient.
            if index in self._hooked or parameter.stop_gradient:
                continue
            refuse_main_grad(parameter, self._roll.names[index])
            method: weakref.WeakMethod[Callable[[int], None]]
            method = weakref.WeakMethod(self._gradient_added)
            _call_on_addition(parameter, method, index)
            self._hooked.add(index)

    def _gradient_added(self, index: int) -> None:
        """A backward has added to the gradient of parameter `index`; called by its hook."""
        if not self._armed:
            return
        self._counts[index] += 1
        if self._first_gradient is None:
            self._first_gradient = time.perf_counter()
        if self._expected is None:
            self._order.append(index)
            if self._early:
                self._sent.expect_end(index, self._parameters)
            return
        bucket = self._bucket_of.get(index)
        if bucket is None:  # had no gradient on any rank so far
            return
        if bucket < self._next:
            self._late.append(index)
        elif self._counts[index] == self._expected[index]:
            self._missing[bucket] -= 1
            while self._early and self._next < len(self._buckets) and not self._missing[self._next]:
                self._send_next()

    @paddle.no_grad()
    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        flat = bucket.join(self._parameters, (self._weight or 1.0) / len(self._scope.ranks))
        if self._armed:  # from here on, it is not to change
            for index in bucket.members:
                self._sent.add(index, self._parameters[index].grad)
        wire = self._codec.encode(flat, bucket)
        self._flats.append(wire)
        self._queued.append((time.perf_counter(), int(wire.size) * wire.element_size()))
        label = f"bucket {self._next} of {len(self._buckets)} of step {self._step}"
        self._tasks.append(self._all_reducer.send(wire, label, self._scope, self._place))
        self._next += 1

    def _send_rest(self) -> None:
        while self._next < len(self._buckets):
            self._send_next()

    @paddle.no_grad()
    def _wait(self) -> None:
        for place in range(self._num_arrived, len(self._tasks)):
            self._tasks[place].wait()
            dtype = self._parameters[self._buckets[place].members[0]].dtype
            self._flats[place] = self._codec.decode(self._flats[place], dtype)
        self._num_arrived = len(self._tasks)

    def _timeline(self, backward_ended: float) -> Timeline:
        sent = zip(self._queued, self._tasks, strict=True)
        return Timeline(
            began=self._began,
            first_gradient=self._first_gradient,
            backward_ended=backward_ended,
            ended=time.perf_counter(),
            buckets=tuple(
                BucketTimes(number, num_bytes, queued, task.started, task.ended)
                for number, ((queued, num_bytes), task) in enumerate(sent)
            ),
        )

    # ----------------------------------------------------------------------------- agreeing

    def _learn(self) -> None:
        """Agree on how often each gradient is added to, and in which order they become ready."""
        self._agreement.check_parameters(self._label("parameters"))
        counts = self._counts + [0] * (len(self._parameters) - len(self._counts))
        last = {index: position for position, index in enumerate(self._order)}
        # A gradient that did not come goes to the end, later parameters first.
        ready = sorted(
            range(len(self._parameters)), key=lambda i: (last.get(i, len(self._order)), -i)
        )
        present = [gradient is not None for gradient in self._roll.gradients]
        is_first = peers().rank == self._scope.ranks[0]  # whose order all take over
        learnt = self._all_reducer.largest(
            [*counts, *present, *(ready if is_first else [0] * len(ready))],
            self._label("order of gradients"),
            self._scope,
        )
        size = len(counts)
        counts, presences, order = (
            [int(number) for number in learnt[first : first + size]]
            for first in (0, size, 2 * size)
        )
        here = {i for i, there in enumerate(presences) if there}
        here |= self._bucket_of.keys() & set(self._roll.trained)
        # One that has a place and is not used in this step may be in the next.
        self._usual.update({i: count for i, count in enumerate(counts) if count})
        self._expected = [self._usual.get(i, 0) for i in range(len(counts))]
        self._plan([i for i in order if i in here or counts[i]])

    def _plan(self, order: list[int]) -> None:
        self._set_buckets(plan_buckets(self._parameters, order, **self._sizes))

    def _set_buckets(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket.members}
        self._codec.plan(self._buckets)

    def _got_more_than_expected(self) -> bool:
        """Then a bucket could have left too early, or was kept for no reason."""
        expected = self._expected or []
        return any(
            count > usual and index in self._bucket_of
            for index, (count, usual) in enumerate(zip(self._counts, expected, strict=False))
        )

    def _has_long_frozen(self, changed: bool) -> bool:
        """Whether buckets have parameters that are not trained any more, not only in turn."""
        self._steps_unchanged = 0 if changed else self._steps_unchanged + 1
        return self._steps_unchanged == 2 and not self._bucket_of.keys() <= {*self._roll.trained}

    def _without_gradient_anywhere(self) -> frozenset[int]:
        present = [float(gradient is not None) for gradient in self._roll.gradients]
        label = self._label("which gradients there are")
        anywhere = self._all_reducer.largest(present, label, self._scope)
        return frozenset(i for i, there in enumerate(anywhere[: len(present)]) if not there)

    @property
    def _place(self) -> str:
        return f"gradient sync of step {self._step}"

    def _label(self, what: str) -> str:
        return f"{self._place}: {what}"

    def _besides(self, nowhere: frozenset[int]) -> list[int]:
        """The parameters that have a gradient on some rank, and no place in a bucket."""
        known = range(len(self._parameters))
        return [i for i in known if i not in self._bucket_of and i not in nowhere]

    def _stop_sending_early(self) -> None:
        self._early = False
        _logger.warning(
            "gradient sync: gradients were changed by hand inside of last_backward(), such as by "
            "unscaling or clipping. The change is kept: from now on nothing is sent while the "
            "backward runs, as with mode 'fused'. To have both, change gradients after "
            "last_backward(), when they are the mean over the ranks."
        )

    def _repeat(self) -> None:
        """Send every bucket again, from gradients that are complete now."""
        if self._late:
            _logger.warning(
                "gradient sync: '%s' got a gradient after its bucket was sent: the graph is not "
                "that of the step before. All gradients are sent again in this step (exact, but "
                "serial), and the order is learnt anew.",
                self._roll.names[self._late[0]],
            )
        self._next, self._num_arrived = 0, 0
        self._flats, self._tasks, self._queued = [], [], []
        self._codec.begin()
        self._send_rest()
        self._wait()

    def _add_buckets(self, nowhere: frozenset[int]) -> None:
        """Make buckets for the gradients that none has a place for."""
        besides = self._besides(nowhere)
        self._set_buckets([*self._buckets, *plan_buckets(self._parameters, besides, **self._sizes)])

    def _warn_of_missing(self, missing: list[int]) -> None:
        trained = {*self._roll.trained}
        missing = [index for index in missing if index in trained]  # what is frozen has none
        if missing and not self._always_exchange_presence and not self._warned:
            self._warned = True
            _logger.warning(
                "gradient sync: '%s' has no gradient in this step although it had one before; it "
                "counts as zero if another rank has one. With graphs that change, set "
                "find_unused_parameters=True to be spared this message.",
                self._roll.names[missing[0]],
            )


def _call_on_addition(
    parameter: paddle.Tensor, method: weakref.WeakMethod[Callable[[int], None]], index: int
) -> None:
    """Call ``method(index)`` after each addition to the gradient, while its owner lives."""

    def added() -> None:
        call = method()
        if call is not None:
            call(index)

    on_gradient_added(parameter, added)
