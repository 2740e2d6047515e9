"""Gloo collectives one after the other in a thread, which begin when all ranks are there.

gloo (Paddle 2.6, 3.3) has four faults that show as soon as ranks are not in step:

- a collective fails after 30 s of waiting for a rank that is merely late, and its group is broken
  for good;
- buffers of different sizes, or those of different steps, are summed silently;
- two threads in one group give wrong sums silently;
- it cannot be interrupted while it waits for a process that is stopped.

So a `GlooLane` has a thread and a group of its own. Before each collective the ranks compare its
label in a collective of `MEETING` numbers; sums of a few numbers are computed in it, too. If the
labels differ, all ranks raise the same error, which names them. If that small collective fails
because a rank is late, the ranks wait for it in an exchange (`ControlClient`), which has no such
limit, make a new group, and try again: nothing has been summed yet. So nothing goes through rank 0
unless a rank is late by more than 30 s.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.backward import raise_in_caller
from paddle_recompute._paddle.distributed import all_reduce_numbers, is_from_gloo
from paddle_recompute._paddle.native_calls import native_call
from paddle_recompute.distributed.connection import peers
from paddle_recompute.distributed.groups import make_gloo_group
from paddle_recompute.distributed.peer_state import Scope
from paddle_recompute.errors import PeerError, SyncError

Result = TypeVar("Result")

MAIN_LANE = "main collectives"
"""Those that the main thread waits for; buckets of gradients have a lane of their own."""
MEETING = 20
"""Numbers of the collective in which ranks meet: a `fingerprint`, and what is summed."""
MOST_SUMMED = MEETING - 4
_HALF_OF_HASH = 20
"""Bits; sums of squares of 8,192 ranks are exact in float64."""
MOST_RENEWALS = 20
"""New groups for one collective: with rank after rank late by more than 30 s."""
_logger = logging.getLogger("paddle_recompute")


@functools.lru_cache(maxsize=64)
def fingerprint(text: str) -> tuple[float, ...]:
    """Four numbers from whose sums over the ranks `are_equal` sees whether all have this `text`."""
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    mask = (1 << _HALF_OF_HASH) - 1
    low, high = number & mask, (number >> _HALF_OF_HASH) & mask
    return low, low * low, high, high * high


def are_equal(sums: Sequence[float], num_ranks: int) -> bool:
    """Whether all ranks had the same text, from the sums over the ranks of its `fingerprint`.

    n times the sum of squares is the square of the sum only where all n numbers are equal.
    """
    low, low_squares, high, high_squares = map(int, sums)
    return low**2 == num_ranks * low_squares and high**2 == num_ranks * high_squares


class QueuedCollective(Generic[Result]):
    """A collective of a lane, or several.

    Attributes:
        started: When all ranks were there and it began (``time.perf_counter``); None: not yet.
        ended: When it had ended.
    """

    def __init__(
        self,
        function: Callable[[Group], Result] | None,
        label: str,
        scope: Scope,
        code: str,
        numbers: Sequence[float],
        has_met: bool,
    ) -> None:
        self.started: float | None = None
        self.ended: float | None = None
        self.label = label
        self.scope = scope
        self.code = code
        self.numbers = numbers
        self._function = function
        self._has_met = has_met
        self._has_begun = threading.Event()
        self._done = threading.Event()
        self._result: Result
        self.error: BaseException | None = None

    def run(self, lane: GlooLane) -> None:
        """To be called by the lane's thread."""
        try:
            peers().check(self.scope, self.label)
            sums = [] if self._has_met else lane.meet(self)
            self.started = time.perf_counter()
            self._has_begun.set()
            if self._function is None:
                self._result = sums  # type: ignore[assignment]
            else:
                with native_call():
                    self._result = self._function(lane.group)
            self.ended = time.perf_counter()
        except BaseException as error:
            self.error = error
        finally:
            self._has_begun.set()
            self._done.set()

    def wait(self) -> Result:
        """The result, when there is one.

        Raises:
            PeerError: A rank will not come, or the collective failed.
            SyncError: The ranks are at different collectives.
        """
        if not self._done.is_set():
            peers().wait_until(self._has_begun.wait, self.label, self.scope)
            # The ranks have met here. Now each computes too, as in a Program, one longer than
            # another, which may be at its next collective already.
            peers().wait_until(self._done.wait, self.label, self.scope, matches_calls=False)
        error = self.error
        if error is None:
            return self._result
        if not isinstance(error, SyncError):
            error = peers().explain(error, self.label, self.scope)
        raise_in_caller(error)
        raise error from (self.error if error is not self.error else None)


class GlooLane:
    """A thread and a group, for collectives between the ranks of `scope` in one order.

    The thread is a daemon: it may be inside a collective with a peer that is gone when the process
    ends (`_paddle.native_call`).

    Args:
        scope: All of its ranks must make the lane.
        name: The same on all ranks; tells it apart from other lanes of the same ranks.
    """

    def __init__(self, scope: Scope, name: str) -> None:
        self.name = name
        self.scope = scope
        self.group: Group = make_gloo_group(scope, name)
        self._jobs: queue.SimpleQueue[QueuedCollective[object]] = queue.SimpleQueue()
        self._broken: list[Group] = []  # to end one could wait for what still hangs in it
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def begin(
        self,
        function: Callable[[Group], Result] | None,
        label: str,
        *,
        code: str = "",
        numbers: Sequence[float] = (),
        has_met: bool = False,
    ) -> QueuedCollective[Result]:
        """Call ``function(group)`` in the lane's thread, when all ranks are there.

        Args:
            function: The collectives. They may be in another group that nobody uses meanwhile.
                None: the result is the sums over the ranks of each of `numbers`.
            label: What it is, as in `ControlClient.wait_until`; the same on every rank.
            code: What else must be the same on every rank, such as sizes.
            numbers: At most `MOST_SUMMED`, as many on every rank.
            has_met: Whether the ranks have agreed a moment ago, in this lane, that this comes next.
                Then they do not compare it again.
        """
        job = QueuedCollective(function, label, self.scope, code, numbers, has_met)
        self._jobs.put(job)  # type: ignore[arg-type]
        return job

    def meet(self, job: QueuedCollective[Result]) -> list[float]:
        """Wait for all ranks to be at `job`; the sums of its numbers. Called in the lane's thread.

        Raises:
            SyncError: They are at different ones.
        """
        own = [*fingerprint(f"{job.label} {job.code}"), *job.numbers]
        own += [0.0] * (MEETING - len(own))
        for _ in range(MOST_RENEWALS):
            try:
                with native_call():
                    sums = all_reduce_numbers(self.group, own, "sum")
                break
            except (RuntimeError, ValueError) as error:
                if not is_from_gloo(error):
                    raise
                self._renew(job, error)
        else:
            raise SyncError(f"{job.label}: gloo lost the connection {MOST_RENEWALS} times")
        if not are_equal(sums[:4], len(job.scope.ranks)):
            # The labels differ, or else the codes: one of the two raises.
            described = f"{job.label} ({job.code})" if job.code else job.label
            peers().exchange(described, job.scope, lane=self.name)
            raise SyncError(f"{job.label}: two descriptions have the same checksum by chance")
        return sums[4 : 4 + len(job.numbers)]

    def _renew(self, job: QueuedCollective[Result], error: BaseException) -> None:
        if peers().cause() is None:
            _logger.info(
                "%s: a rank is late, and gloo has given up the connection (%s); the ranks wait for "
                "it and connect anew",
                job.label,
                str(error).strip().splitlines()[-1],
            )
        self._broken.append(self.group)
        try:
            self.group = make_gloo_group(job.scope, self.name)
        except PeerError:  # that rank is not late
            raise peers().explain(error, job.label, job.scope) from error

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            job.run(self)
            del job  # its tensors


_lanes: dict[tuple[tuple[int, ...], str], GlooLane] = {}


def lane_of(scope: Scope, name: str) -> GlooLane:
    """The lane `name` of the ranks of `scope`, made at the first call; each of them must call it.

    All scopes of the same ranks have it in common: a gloo group costs a connection between each
    two of them.
    """
    if (scope.ranks, name) not in _lanes:
        _lanes[scope.ranks, name] = GlooLane(scope, name)
    lane = _lanes[scope.ranks, name]
    lane.scope = scope  # its limits may be new
    return lane
