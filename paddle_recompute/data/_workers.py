"""The processes that assemble batches: one that dies or hangs ends the run with an error.

Paddle (2.6, 3.x) raises a SystemError where one has died: in the loop over the batches, or, from
its handler of SIGCHLD, wherever the main thread is. In C++ code (an operator that reads its
arguments, a backward) such an error is lost, or becomes another one. So a death is told where the
next batch is asked for. For a worker that hangs Paddle waits for ever.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType

from paddle_recompute.errors import DataError

_WORDS = ("DataLoader", "data reader")
_deaths: list[SystemError] = []
"""What Paddle has said of workers that died, until a batch is asked for."""


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
        _deaths.clear()  # of workers of others
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
            with _deaths_named():
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


def keep_deaths() -> None:
    """Let the death of a worker wait for the next batch; to be called once Paddle has its handler.

    The loops of others over workers of their own end as before: Paddle's thread that reads from
    the workers finds a dead one within 5 s.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    is_ours = getattr(handler, "keeps_deaths", False)
    if is_ours or not callable(handler) or threading.current_thread() != threading.main_thread():
        return

    def keep(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except SystemError as error:
            _deaths.append(error)

    keep.keeps_deaths = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, keep)


def raise_death() -> None:
    """Raise what was kept."""
    if _deaths:
        raise _deaths.pop()


@contextlib.contextmanager
def _deaths_named() -> Iterator[None]:
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
