"""RNG state: capture it before a forward (dropout masks), restore it for the recomputation."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from paddle_recompute._paddle.rng_state import (
    generator_states,
    hybrid_parallel_tracker,
    mark_by_drawing,
    mark_of,
    set_generator_states,
    tracker_states,
)


class RngState(NamedTuple):
    """The state of all streams: Paddle (CPU and current device), fleet's tracker of tensor-parallel
    streams, NumPy's global stream and Python's. None: that stream is not restored.
    """

    generators: tuple[Any, Any] | None
    tracker: dict[str, Any] | None
    numpy: Any
    python: Any

    @classmethod
    def capture(cls) -> RngState:
        """The state now. Costs a few kilobytes and no device synchronization on CPU."""
        return cls(*(read() for read, _, _ in _STREAMS))

    def restore(self) -> None:
        """Set every stream to this state."""
        for state, (_, write, _) in zip(self, _STREAMS, strict=True):
            if state is not None:
                write(state)

    def only_advanced(self) -> RngState:
        """The state of the streams that were drawn from since; None for the others."""
        fields = zip(self, self.now(), _STREAMS, strict=True)
        return RngState(
            *(
                None if then is None or mark(then) == mark(now) else then
                for then, now, (_, _, mark) in fields
            )
        )

    def now(self) -> RngState:
        """The present state of the streams that are not None here."""
        fields = zip(self, _STREAMS, strict=True)
        return RngState(*[None if state is None else read() for state, (read, _, _) in fields])


_STREAMS: tuple[tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]], ...] = (
    (lambda: generator_states(), set_generator_states, mark_of),
    (tracker_states, lambda states: hybrid_parallel_tracker().set_states_tracker(states), mark_of),
    (
        lambda: np.random.get_state(),
        lambda state: np.random.set_state(state),
        lambda state: (state[1].tobytes(), state[2:]),
    ),
    (lambda: random.getstate(), lambda state: random.setstate(state), lambda state: state),
)
"""For each stream: a getter, a setter, and a key that is equal for equal states."""


class RngSnapshot:
    """The RNG state before a call, restored for its recomputation.

    Only streams from which the call has drawn are restored. So functions that draw nothing neither
    affect other threads nor are affected by them.

    **Threads.** Paddle, NumPy and Python have one global stream each for all threads. None of them
    records which thread has drawn. `problem` is set if another thread may have drawn from Paddle's
    streams during the call or its recomputation: a recomputed function ran at the same time, or a
    stream does not end in the state in which the first forward left it. NumPy's and Python's
    streams are not compared.
    """

    __slots__ = (
        "_first_was_alone",
        "_is_alone",
        "_marks",
        "_may_seed",
        "_start",
        "_thread",
        "needs_restore",
        "problem",
        "uses_host_rng",
    )  # fmt: skip

    _start: tuple[Any, Any, Any, Any]
    """The fields of an `RngState`."""

    def __init__(self, *, uses_host_rng: bool, may_seed: bool = False) -> None:
        """Before the call; `end_first` must follow.

        Args:
            uses_host_rng: Whether the call may draw from NumPy's stream or Python's.
            may_seed: Whether it may seed a stream. Then an unchanged end state does not show that
                nothing was drawn.
        """
        self.uses_host_rng, self._may_seed = False, may_seed
        self._start = generator_states(), tracker_states(), None, None
        if uses_host_rng:
            self.read_host_rng()
        self.needs_restore = True
        """After `end_first`: whether a stream must be restored."""
        self.problem: str | None = None
        """After `end_again`: why the recomputation may have drawn other numbers from Paddle's
        streams.
        """
        self._begin()

    def read_host_rng(self) -> None:
        """During the call: capture NumPy's and Python's streams, because it may draw from them
        now.
        """
        if not self.uses_host_rng:
            self.uses_host_rng = True
            self._start = (*self._start[:2], np.random.get_state(), random.getstate())

    def now(self) -> RngState:
        """During the call: the present RNG state."""
        host = (np.random.get_state(), random.getstate()) if self.uses_host_rng else (None, None)
        return RngState(generator_states(), tracker_states(), *host)

    def skip_to(self, state: RngState) -> None:
        """In the recomputation: set to `state` those streams that were restored."""
        if self.needs_restore:
            pairs = zip(self._start, state, strict=True)
            RngState(*(None if start is None else new for start, new in pairs)).restore()

    def _begin(self) -> None:
        """Until `_end`, detect calls of other threads that run at the same time."""
        self._thread, self._is_alone = threading.get_ident(), True
        _running.append(self)  # first, so that at least one of two calls sees the other
        for other in tuple(_running):
            if other._thread != self._thread:
                other._is_alone = self._is_alone = False

    def _end(self) -> bool:
        """Returns whether no call of another thread ran at the same time."""
        _running.remove(self)
        return self._is_alone

    def end_first(self) -> None:
        """After the call."""
        self._first_was_alone = self._end()
        generators, tracker, numpy, _ = self._start
        # Marks of Paddle's streams, before and after the call.
        then, now = self._marks = mark_of(generators), mark_of(generator_states())
        if self._may_seed:
            return
        others: tuple[Any, Any, Any] = None, None, None
        if tracker or numpy or tracker_states():
            others = RngState(None, *self._start[1:]).only_advanced()[1:]
        self._start = None if then == now else generators, *others
        self.needs_restore = any(self._start)

    def begin_again(self) -> RngState:
        """Before the recomputation; `end_again` must follow, with the result."""
        self.problem = None
        start = RngState(*self._start)
        before = start.now()
        start.restore()
        self._begin()
        return before

    def end_again(self, before: RngState) -> None:
        """After the recomputation."""
        was_alone = self._end()
        if self._start[0] is not None:
            self.problem = self._compare(mark_by_drawing(), was_alone)
        before.restore()

    def _compare(self, end: Any, was_alone: bool) -> str | None:
        if end == self._marks[0] and (end == self._marks[1] or not self._may_seed):
            return None  # this function draws nothing; another thread drew during the first forward
        if not (self._first_was_alone and was_alone):
            return (
                "it draws random numbers while a recomputed function of another thread may draw, "
                "and Paddle has one random stream for all threads. Let one thread draw at a time; "
                "if functions draw no random numbers, give them preserve_rng_state=False, in all "
                "threads"
            )
        if end != self._marks[1]:
            return (
                "it draws other numbers from Paddle's random stream than in its first forward, or "
                "none. If the first one builds Layers or parameters, build them before; let one "
                "thread draw at a time"
            )
        return None


_running: list[RngSnapshot] = []
