"""The processes that assemble batches: one that dies or hangs ends the run with an error.

Paddle (2.6, 3.x) raises a SystemError where one has died: in the loop over the batches, or, from
its handler of SIGCHLD, wherever the main thread is. For one that hangs it waits for ever.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType

from paddle_recompute import _paddle
from paddle_recompute.errors import DataError

_WORDS = ("DataLoader", "data reader")


class WorkerWatch:
    """Ends the workers that were started inside of the ``with`` block if they give no batch.

    Args:
        longest_wait: Seconds that the next batch may take.
    """

    def __init__(self, longest_wait: float) -> None:
        self._longest_wait = longest_wait
        self._before = set(multiprocessing.active_children())
        self._deadline: float | None = None
        self._closed = threading.Event()
        self._hung = False

    def __enter__(self) -> WorkerWatch:
        threading.Thread(target=self._watch, name="data workers", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the main thread waits for a batch.

        Raises:
            DataError: It came not in time, or a worker has died.
        """
        self._deadline = time.monotonic() + self._longest_wait
        try:
            with dead_workers_named():
                yield
        except DataError as error:
            if self._hung:
                raise DataError(
                    f"data.num_workers: no batch came within {self._longest_wait:.0f} s, so the "
                    "processes that make them were ended. Is the machine out of memory, or stopped "
                    "one of them? data.num_workers: 0 does without them"
                ) from error
            raise
        finally:
            self._deadline = None

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._longest_wait / 4)):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._hung = True
                for worker in set(multiprocessing.active_children()) - self._before:
                    worker.kill()
                return


def hand_deaths_on() -> None:
    """Let the error of a worker's death leave a backward as itself, once Paddle has its handler.

    That handler of SIGCHLD (2.6, 3.x) raises wherever the main thread is. Where that is Python code
    which the engine has called, the engine would make an ``OSError`` of it without these words.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    is_ours = getattr(handler, "hands_on", False)
    if is_ours or not callable(handler) or threading.current_thread() != threading.main_thread():
        return

    def hand_on(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except SystemError as error:
            _paddle.hand_on(error)
            raise

    hand_on.hands_on = True  # type: ignore[attr-defined]
    _paddle.watch_backward()
    signal.signal(signal.SIGCHLD, hand_on)


@contextlib.contextmanager
def dead_workers_named() -> Iterator[None]:
    """Inside, the death of a worker is a `DataError`.

    Raises:
        DataError: A worker has died.
    """
    try:
        yield
    except SystemError as error:
        if not any(word in str(error) for word in _WORDS):
            raise
        raise DataError(
            "data.num_workers: a process that makes batches has died: killed, crashed or out of "
            "memory. Start again with train.resume=auto, or with data.num_workers=0, which does "
            "without them"
        ) from error
