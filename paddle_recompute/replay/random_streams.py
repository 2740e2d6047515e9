"""Capture and replay every random stream that a forward may draw from."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_recompute._paddle.random_streams import (
    generator_states,
    hybrid_parallel_tracker,
    mark_of_generator_state,
    set_generator_states,
)


@dataclass(frozen=True)
class RngState:
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
            tracker=hybrid_parallel_tracker().get_states_tracker(),
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

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, the streams continue from this state; afterwards they are restored."""
        before = self._now()
        self.restore()
        try:
            yield
        finally:
            before.restore()

    def _now(self) -> RngState:
        """The current state of the same streams."""
        tracker = hybrid_parallel_tracker
        return RngState(
            generators=None if self.generators is None else generator_states(),
            tracker=None if self.tracker is None else tracker().get_states_tracker(),
            numpy=None if self.numpy is None else np.random.get_state(),
            python=None if self.python is None else random.getstate(),
        )

    def where_moved(self) -> RngState:
        """This state without the streams that are still at it."""
        now = self._now()
        state = self
        if _same(self.generators, now.generators):
            state = replace(state, generators=None)
        if _same(self.tracker, now.tracker):
            state = replace(state, tracker=None)
        if self.numpy[2:] == now.numpy[2:] and np.array_equal(self.numpy[1], now.numpy[1]):
            state = replace(state, numpy=None)
        if self.python == now.python:
            state = replace(state, python=None)
        return state


def _same(one: Any, other: Any) -> bool:
    return bool(_marks(one) == _marks(other))


def _marks(states: Any) -> Any:
    """A value that is equal for equal states of Paddle's generators."""
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

    def __init__(self) -> None:
        self._start: RngState | None = None
        self._first_end: Any = None
        self._first_was_alone = True
        self.problem: str | None = None
        """After `again`: why other numbers may have been drawn from Paddle's streams."""

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Around the call."""
        start = RngState.capture()
        with _window() as window:
            yield
        self._start = start.where_moved()
        if self._start.generators is not None:
            self._first_end = _marks(generator_states())
            self._first_was_alone = window.is_alone

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around the repetition."""
        assert self._start is not None
        self.problem = None
        with self._start.replayed():
            with _window() as window:
                yield
            if self._start.generators is not None:
                self.problem = self._compare(_marks(generator_states()), window)

    def _compare(self, end: Any, window: _Window) -> str | None:
        assert self._start is not None
        if end == _marks(self._start.generators):
            return None  # the function draws nothing: another thread did, in the first forward
        if not (self._first_was_alone and window.is_alone):
            return (
                "it draws random numbers while a recomputed function of another thread may draw, "
                "and Paddle has one random stream for all threads"
            )
        if end != self._first_end:
            return "it draws other numbers from Paddle's random stream than in its first forward"
        return None


class _Window:
    """The duration of a call; `is_alone` if no call of another thread overlaps with it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.is_alone = True


_open_windows: list[_Window] = []
_lock = threading.Lock()


@contextlib.contextmanager
def _window() -> Iterator[_Window]:
    mine = _Window()
    with _lock:
        others = [window for window in _open_windows if window.thread != mine.thread]
        for window in others:
            window.is_alone = False
        mine.is_alone = not others
        _open_windows.append(mine)
    try:
        yield mine
    finally:
        with _lock:
            _open_windows.remove(mine)
