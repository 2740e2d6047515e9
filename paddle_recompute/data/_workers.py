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


class WorkerWatch:
    """Ends the workers of a loader if they give no batch, and tells which have died.

    Args:
        longest_wait: Seconds that the next batch may take.
    """

    def __init__(self, longest_wait: float) -> None:
        self._longest_wait = longest_wait
        self._workers: set[multiprocessing.process.BaseProcess] = set()
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
    def starting(self) -> Iterator[None]:
        """Inside, Paddle starts the workers."""
        before = set(multiprocessing.active_children())
        yield
        self._workers = set(multiprocessing.active_children()) - before
        _let_deaths_wait()

    def check(self) -> None:
        """Check the workers.

        Raises:
            DataError: One has died.
        """
        if any(worker.exitcode not in (None, 0) for worker in self._workers):
            raise _death()

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
                for worker in self._workers:
                    worker.kill()
                return


def _let_deaths_wait() -> None:
    """Let no death of a worker raise in the midst of something, once Paddle has its handler.

    `WorkerWatch` and Paddle's thread that reads from the workers, within 5 s, find a dead one.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    is_ours = getattr(handler, "lets_deaths_wait", False)
    if is_ours or not callable(handler) or threading.current_thread() != threading.main_thread():
        return

    def wait(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(SystemError):
            handler(number, frame)

    wait.lets_deaths_wait = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, wait)


@contextlib.contextmanager
def _deaths_named() -> Iterator[None]:
    try:
        yield
    except SystemError as error:
        if not any(word in str(error) for word in _WORDS):
            raise
        raise _death() from error


def _death() -> DataError:
    return DataError(
        "data.num_workers: a process that makes batches has died: killed, crashed or out of "
        "memory. Start again with train.resume=auto, or with data.num_workers=0, which does "
        "without them"
    )
