"""Capture and replay every random stream that a forward may draw from."""

from __future__ import annotations

import random
import threading
from typing import Any, NamedTuple

import numpy as np

from paddle_recompute._paddle.random_streams import (
    generator_states,
    hybrid_parallel_tracker,
    mark_of_generator_state,
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

    def _now(self) -> RngState:
        """The current state of the same streams."""
        return RngState(
            generators=self.generators and generator_states(),
            tracker=None if self.tracker is None else tracker_states(),
            numpy=None if self.numpy is None else np.random.get_state(),
            python=None if self.python is None else random.getstate(),
        )

    def only_moved(self, moved: tuple[Any, Any] | None = None) -> RngState:
        """This state without the streams that are still at it; `moved`: the marks of the
        generators in this state and now, if they are known.
        """
        then, end = moved or (_marks(self.generators), _marks(generator_states()))
        tracker, numpy, python = self.tracker, self.numpy, self.python
        if tracker is not None and _marks(tracker) == _marks(tracker_states()):
            tracker = None
        if numpy is not None and _same_numpy_state(numpy, np.random.get_state()):
            numpy = None
        if python is not None and python == random.getstate():
            python = None
        return RngState(None if then == end else self.generators, tracker, numpy, python)


def _same_numpy_state(one: Any, other: Any) -> bool:
    return bool(one[2:] == other[2:] and np.array_equal(one[1], other[1]))


def _marks(states: Any) -> Any:
    """A value that is equal for equal states of Paddle's generators."""
    if not states:
        return states
    if isinstance(states, dict):
        return {name: mark_of_generator_state(state) for name, state in states.items()}
    return [mark_of_generator_state(state) for state in states]


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
        "_first_was_alone", "_marks", "_may_seed", "_start", "_window", "moves", "of_the_host",
        "problem",
    )  # fmt: skip

    def __init__(self, *, of_the_host: bool, may_seed: bool = False) -> None:
        """Before the call; `end_first` must follow.

        Args:
            of_the_host: Whether the call may draw from NumPy's stream or Python's.
            may_seed: Whether it may set a stream: one that ends where it began may have moved.
        """
        self.of_the_host, self._may_seed = of_the_host, may_seed
        self._start = RngState(generator_states(), tracker_states(), None, None)
        if of_the_host:
            self.read_host()
        self.moves = True
        """After `end_first`: whether there is a stream that the repetition must start again."""
        self.problem: str | None = None
        """After `end_again`: why other numbers may have been drawn from Paddle's streams."""
        self._window = _Window()

    def read_host(self) -> None:
        """During the call, which may draw from NumPy's stream or Python's from now on."""
        self.of_the_host = True
        if self._start.numpy is None:
            start = self._start
            self._start = RngState(
                start.generators, start.tracker, np.random.get_state(), random.getstate()
            )

    def end_first(self) -> None:
        """After the call."""
        self._first_was_alone = self._window.close()
        # Of Paddle's streams, before the call and after it.
        self._marks = _marks(self._start.generators), _marks(generator_states())
        if not self._may_seed:
            self._start = self._start.only_moved(self._marks)
            self.moves = any(self._start)

    def begin_again(self) -> RngState:
        """Before the repetition; `end_again` must follow, with the result."""
        self.problem = None
        before = self._start._now()
        self._start.restore()
        self._window = _Window()
        return before

    def end_again(self, before: RngState) -> None:
        """After the repetition."""
        was_alone = self._window.close()
        if self._start.generators is not None:
            self.problem = self._compare(_marks(generator_states()), was_alone)
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


class _Window:
    """The duration of a call, until `close`; `is_alone` if no call of another thread overlaps."""

    __slots__ = ("is_alone", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.is_alone = True
        with _lock:
            for window in _open_windows:
                if window.thread != self.thread:
                    window.is_alone = self.is_alone = False
            _open_windows.append(self)

    def close(self) -> bool:
        """Returns `is_alone`."""
        with _lock:
            _open_windows.remove(self)
        return self.is_alone


_open_windows: list[_Window] = []
_lock = threading.Lock()
