"""Capture and replay every random stream that a forward may draw from."""

from __future__ import annotations

import random
import threading
from typing import Any, NamedTuple

import numpy as np

from paddle_recompute._paddle.random_streams import (
    generator_states,
    hybrid_parallel_tracker,
    mark_and_move,
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
        return cls(
            generators=generator_states(),
            tracker=tracker_states(),
            numpy=np.random.get_state(),
            python=random.getstate(),
        )

    def restore(self) -> None:
        """Set every stream to this state."""
        if self.generators is not None:
            set_generator_states(self.generators)
        if self.tracker is not None:
            hybrid_parallel_tracker().set_states_tracker(self.tracker)
        if self.numpy is not None:
            np.random.set_state(self.numpy)
        if self.python is not None:
            random.setstate(self.python)

    def only_moved(self) -> RngState:
        """This state without the streams that are still at it."""
        generators, tracker, numpy, python = self
        if generators is not None and mark_of(generators) == mark_of(generator_states()):
            generators = None
        if tracker is not None and mark_of(tracker) == mark_of(tracker_states()):
            tracker = None
        if numpy is not None and _same_numpy_state(numpy, np.random.get_state()):
            numpy = None
        if python is not None and python == random.getstate():
            python = None
        return RngState(generators, tracker, numpy, python)


def _same_numpy_state(one: Any, other: Any) -> bool:
    return bool(one[2:] == other[2:] and np.array_equal(one[1], other[1]))


class Draws:
    """Let a repetition draw what the first call drew.

    A stream that the call does not draw from is not touched in the repetition. So functions that
    draw nothing do not disturb other threads, and other threads do not disturb them.

    **Threads.** Paddle, NumPy and Python have one global stream each for all threads, and none of
    them tells which thread has drawn. `problem` says when another thread may have drawn from
    Paddle's streams during the call or its repetition: a recomputed function ran at the same time,
    or a stream ends in another state. Draws from the other streams are not compared.
    """

    __slots__ = (
        "_first_was_alone", "_is_alone", "_marks", "_may_seed", "_start", "_thread", "moves",
        "of_the_host", "problem",
    )  # fmt: skip

    _start: tuple[Any, Any, Any, Any]
    """The fields of an `RngState`."""

    def __init__(self, *, of_the_host: bool, may_seed: bool = False) -> None:
        """Before the call; `end_first` must follow.

        Args:
            of_the_host: Whether the call may draw from NumPy's stream or Python's.
            may_seed: Whether it may set a stream: one that ends where it began may have moved.
        """
        self.of_the_host, self._may_seed = False, may_seed
        self._start = generator_states(), tracker_states(), None, None
        if of_the_host:
            self.read_host()
        self.moves = True
        """After `end_first`: whether there is a stream that the repetition must start again."""
        self.problem: str | None = None
        """After `end_again`: why other numbers may have been drawn from Paddle's streams."""
        self._begin()

    def read_host(self) -> None:
        """During the call, which may draw from NumPy's stream or Python's from now on."""
        if not self.of_the_host:
            self.of_the_host = True
            self._start = (*self._start[:2], np.random.get_state(), random.getstate())

    def _begin(self) -> None:
        """Note the calls of other threads that run at the same time, until `_end`."""
        self._thread, self._is_alone = threading.get_ident(), True
        _running.append(self)  # first, so that of two calls one at least sees the other
        for other in tuple(_running):
            if other._thread != self._thread:
                other._is_alone = self._is_alone = False

    def _end(self) -> bool:
        """Returns whether no call of another thread ran meanwhile."""
        _running.remove(self)
        return self._is_alone

    def end_first(self) -> None:
        """After the call."""
        self._first_was_alone = self._end()
        generators, tracker, numpy, _ = self._start
        # Of Paddle's streams, before the call and after it.
        then, now = self._marks = mark_of(generators), mark_of(generator_states())
        if self._may_seed:
            return
        if tracker or numpy or tracker_states():
            self._start = RngState(*self._start).only_moved()
            self.moves = any(self._start)
        else:
            self._start = (None if then == now else generators), None, None, None
            self.moves = then != now

    def begin_again(self) -> RngState:
        """Before the repetition; `end_again` must follow, with the result."""
        self.problem = None
        generators, tracker, numpy, python = self._start
        before = RngState(
            generators and generator_states(),
            None if tracker is None else tracker_states(),
            numpy and np.random.get_state(),
            python and random.getstate(),
        )
        RngState(*self._start).restore()
        self._begin()
        return before

    def end_again(self, before: RngState) -> None:
        """After the repetition."""
        was_alone = self._end()
        if self._start[0] is not None:
            self.problem = self._compare(mark_and_move(), was_alone)
        before.restore()

    def _compare(self, end: Any, was_alone: bool) -> str | None:
        if end == self._marks[0]:
            return None  # the function draws nothing: another thread did, in the first forward
        if not (self._first_was_alone and was_alone):
            return (
                "it draws random numbers while a recomputed function of another thread may draw, "
                "and Paddle has one random stream for all threads"
            )
        if end != self._marks[1]:
            return "it draws other numbers from Paddle's random stream than in its first forward"
        return None


_running: list[Draws] = []
