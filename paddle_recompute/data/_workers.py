"""Processes that make batches ahead; one that dies or hangs ends the run with an error.

Those of `paddle.io.DataLoader` (2.6, 3.x) share a queue and an event with their parent. If one dies
while it writes a batch, or while it holds the lock of the event, the parent waits forever. Here
they share nothing: each process has a socket of its own, whose other end is the parent's alone. If
it dies, its stream ends. If it hangs, the parent's read has a time limit.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import signal
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from paddle_recompute.errors import DataError

Task = TypeVar("Task")
Batch = TypeVar("Batch")

SECONDS_TO_DIE = 5.0
"""How long a process that was killed is waited for."""
_ENDS_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
"""A terminal or a scheduler sends them to all processes; the parent decides when a worker ends."""
_starting = threading.Lock()
"""No fork of another thread inherits the end of the socket that is a worker's."""


class Workers(Generic[Task, Batch]):
    """Iterates once over ``make(task)`` of each task, in order.

    Each of n processes makes every n-th batch, and waits where its socket is full: it is ahead by
    one batch and by what the socket takes (some 200 KB). The processes are forks, so `make` and
    the tasks are not copied. `make` must not use Paddle: a lock that another thread held at the
    fork stays locked in the fork (seen with the allocator of 3.3.1).

    Args:
        make: Returns a batch that can be pickled.
        tasks: The same sequence at each iteration.
        num_workers: How many processes.
        longest_wait: Seconds that a process may send nothing while a batch is waited for.

    Attributes:
        pids: Of the processes.

    Raises:
        DataError: The system starts no such number of processes.
    """

    def __init__(
        self,
        make: Callable[[Task], Batch],
        tasks: Iterable[Task],
        num_workers: int,
        longest_wait: float,
    ) -> None:
        self._longest_wait = longest_wait
        self._sockets: list[socket.socket] = []
        self._processes: list[_Process] = []
        self._end = weakref.finalize(self, _end, os.getpid(), self._processes, self._sockets)
        for worker in range(num_workers):
            part = itertools.islice(tasks, worker, None, num_workers)
            try:
                self._start(make, part)
            except OSError as error:
                self.close()
                raise DataError(
                    f"data.num_workers: only {worker} of {num_workers} processes could be started "
                    f"({error}); lower it"
                ) from error
        self.pids = [process.pid for process in self._processes]

    def _start(self, make: Callable[[Task], Batch], part: Iterable[Task]) -> None:
        with _starting, _signals_wait():
            ours, theirs = socket.socketpair()
            self._sockets.append(ours)
            pid = os.fork()
            if not pid:
                _work(make, part, ours, theirs)
            theirs.close()
        ours.settimeout(self._longest_wait)
        self._processes.append(_Process(pid))

    def close(self) -> None:
        """End the processes; a thread that waits for a batch of theirs gets an error."""
        self._end()

    def __iter__(self) -> Iterator[Batch]:
        """The batches.

        Raises:
            DataError: A process has died, or sends nothing.
        """
        streams = [one.makefile("rb") for one in self._sockets]
        for worker, stream in itertools.cycle(enumerate(streams)):
            try:
                batch = pickle.load(stream)
            except TimeoutError as error:
                raise DataError(
                    f"data.num_workers: no batch came within {self._longest_wait:.0f} s, so the "
                    "processes that make them were ended. Is the machine out of memory, or stopped "
                    "one of them? data.num_workers: 0 does without them"
                ) from error
            except (EOFError, pickle.UnpicklingError) as error:
                raise DataError(
                    "data.num_workers: a process that makes batches has died, "
                    f"{self._processes[worker].how_it_ended()}. Start again with "
                    "train.resume=auto, or with data.num_workers=0, which does without them"
                ) from error
            if batch is _END:
                return
            yield batch


class _End:
    """Comes after the last batch of a process."""

    def __reduce__(self) -> str:
        return "_END"


_END = _End()


class _Process:
    """A fork of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._lock = threading.Lock()

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._status is None:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int | None:
        """Its exit code, or minus the number of the signal that ended it; None: not known."""
        deadline = time.monotonic() + SECONDS_TO_DIE
        while self._status is None and time.monotonic() < deadline:
            try:
                with self._lock:
                    if self._status is None:
                        pid, status = os.waitpid(self.pid, os.WNOHANG)
                        self._status = os.waitstatus_to_exitcode(status) if pid else None
            except ChildProcessError:  # somebody else has waited for all children
                return None
            if self._status is None:
                time.sleep(0.001)
        return self._status

    def how_it_ended(self) -> str:
        code = self.wait()
        if code is None:
            return "of an unknown cause"
        if code < 0:
            return f"of signal {-code} ({signal.strsignal(-code)}; is the machine out of memory?)"
        return f"with code {code} (its error is above)"


def _end(parent: int, processes: list[_Process], sockets: list[socket.socket]) -> None:
    if os.getpid() != parent:  # a fork has a copy of all that is to be done at an end
        return
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    for one in sockets:
        one.close()


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Inside, this thread handles none of the signals that a worker ignores."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(
    make: Callable[[Any], Any], tasks: Iterable[Any], ours: socket.socket, theirs: socket.socket
) -> None:
    """Make the batches and end this process, without what else an end of the interpreter does."""
    # Nothing of the parent's is collected here: its Paddle objects wait for threads that a fork
    # does not have.
    gc.freeze()
    code = 1
    try:
        for one in _ENDS_THE_PARENT:
            signal.signal(one, signal.SIG_IGN)
        ours.close()
        the_parent_is_gone = contextlib.suppress(ConnectionError)
        with the_parent_is_gone, theirs.makefile("wb") as stream:
            for task in tasks:
                pickle.dump(make(task), stream, protocol=pickle.HIGHEST_PROTOCOL)
                stream.flush()
            pickle.dump(_END, stream)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
