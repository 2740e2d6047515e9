"""Processes that make batches ahead; one that dies or hangs ends the run with an error.

Those of `paddle.io.DataLoader` (2.6, 3.x) share a queue and an event with their parent. If one dies
while it writes a batch, or while it holds the lock of the event, the parent waits forever. Here
they share nothing: each process has a socket of its own, whose other end is the parent's alone. If
it dies, its stream ends. If it hangs, the parent's read has a time limit.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import pickle
import signal
import socket
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from paddle_recompute.errors import DataError

Task = TypeVar("Task")
Batch = TypeVar("Batch")

_SECONDS_TO_DIE = 5.0
"""How long a process that was killed is waited for."""


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
        self._processes: list[BaseProcess] = []
        self._end = weakref.finalize(self, _end, self._processes, self._sockets)
        fork = multiprocessing.get_context("fork")
        for worker in range(num_workers):
            ours, theirs = socket.socketpair()
            ours.settimeout(longest_wait)
            self._sockets.append(ours)
            part = itertools.islice(tasks, worker, None, num_workers)
            process = fork.Process(target=_work, args=(make, part, ours, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)

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
                raise _death(self._processes[worker]) from error
            if batch is _END:
                return
            yield batch


class _End:
    """Comes after the last batch of a process."""

    def __reduce__(self) -> str:
        return "_END"


_END = _End()


def _work(
    make: Callable[[Any], Any], tasks: Iterable[Any], ours: socket.socket, theirs: socket.socket
) -> None:
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which then ends this
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    the_parent_is_gone = contextlib.suppress(ConnectionError)
    with the_parent_is_gone, theirs.makefile("wb") as stream:
        for task in tasks:
            pickle.dump(make(task), stream, protocol=pickle.HIGHEST_PROTOCOL)
            stream.flush()
        pickle.dump(_END, stream)


def _end(processes: list[BaseProcess], sockets: list[socket.socket]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(_SECONDS_TO_DIE)
    for one in sockets:
        one.close()


def _death(process: BaseProcess) -> DataError:
    process.join(_SECONDS_TO_DIE)
    code = process.exitcode
    if code is not None and code < 0:
        how = f"by {signal.Signals(-code).name} (is the machine out of memory?)"
    else:
        how = f"with code {code} (its error is above)"
    return DataError(
        f"data.num_workers: a process that makes batches has died, {how}. Start again with "
        "train.resume=auto, or with data.num_workers=0, which does without them"
    )
