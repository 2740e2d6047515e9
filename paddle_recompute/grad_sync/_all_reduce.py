"""All-reduces that run beside the backward: a thread on gloo, the communication stream on GPUs."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Protocol

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute.distributed import Scope, peers
from paddle_recompute.errors import SyncError
from paddle_recompute.grad_sync._groups import make_gloo_group


class AllReduceTask(Protocol):
    """An all-reduce under way."""

    started: float | None
    """When the all-reduce began (``time.perf_counter``); None: not yet, or unknown to the host."""
    ended: float | None
    """When it ended."""

    def wait(self) -> None:
        """Return when the tensor holds the sum over all ranks; raise what went wrong."""


class AllReducer(Protocol):
    """Sums tensors over the ranks, in the order in which it is given them."""

    def send(self, tensor: paddle.Tensor, label: str, scope: Scope) -> AllReduceTask:
        """Begin to sum `tensor` in place over the ranks of `scope`, and return at once.

        Args:
            tensor: The same shape and dtype on every rank.
            label: What it is, for messages; the same on every rank.
            scope: Whose death ends the wait for it.
        """


class _ThreadTask:
    def __init__(self, tensor: paddle.Tensor, label: str, scope: Scope) -> None:
        self.started: float | None = None
        self.ended: float | None = None
        self._tensor = tensor
        self._label = label
        self._scope = scope
        self._done = threading.Event()
        self._error: BaseException | None = None

    def deliver(self, group: Group) -> None:
        """Sum the tensor; called by the courier's thread."""
        try:
            # gloo gives up after 30 s, which a live rank may be late by, and sums buffers of
            # different sizes without a word: so all say first that they are here, and with what.
            lane = f"{self._scope.name}/buckets"
            peers().exchange(None, self._described(), self._scope, lane=lane)
            self.started = time.perf_counter()
            dist.all_reduce(self._tensor, group=group)
            self.ended = time.perf_counter()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

    def wait(self) -> None:
        peers().wait(self._done, self._label, self._scope)
        if self._error is None:
            return
        if isinstance(self._error, SyncError):
            raise self._error
        raise peers().explain(self._error, self._label, self._scope) from self._error

    def _described(self) -> str:
        return f"{self._label} ({self._tensor.size} x {self._tensor.dtype})"


class ThreadAllReducer:
    """For gloo, whose collectives ignore ``sync_op=False`` but let go of the GIL (2.6, 3.3).

    One thread, with a group of its own that nobody else uses: two threads in one gloo group give
    wrong sums without a word. A daemon: it may be inside a collective with a peer that is gone
    when the process ends.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._tasks: queue.SimpleQueue[_ThreadTask] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run_all, args=(self._tasks, self._group), name="gradients", daemon=True
        )
        self._thread.start()

    def send(self, tensor: paddle.Tensor, label: str, scope: Scope) -> AllReduceTask:
        task = _ThreadTask(tensor, label, scope)
        self._tasks.put(task)
        return task


def _run_all(tasks: queue.SimpleQueue[_ThreadTask], group: Group) -> None:
    while True:
        tasks.get().deliver(group)


class _StreamTask:
    """An asynchronous collective; the host polls it, so that it can notice a peer that is gone."""

    started: float | None = None
    ended: float | None = None

    def __init__(self, task: Any, label: str, scope: Scope) -> None:
        self._task = task
        self._label = label
        self._scope = scope

    def wait(self) -> None:
        began = time.monotonic()
        while not self._task.is_completed():
            peers().check(self._scope, self._label, waited=time.monotonic() - began)
            time.sleep(0.0005)
        self._task.wait()  # and the stream that computes waits too


class StreamAllReducer:
    """For NCCL and other device backends: asynchronous collectives on the communication stream.

    The host waits for the last of them, which it need not for the sums to be right: a peer that
    died would leave it waiting in the next read of a tensor, inside the driver, for ever.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = group

    def send(self, tensor: paddle.Tensor, label: str, scope: Scope) -> AllReduceTask:
        return _StreamTask(dist.all_reduce(tensor, group=self._group, sync_op=False), label, scope)


def all_reducer_of(group: Group | None, scope: Scope) -> AllReducer:
    """The courier for the backend of `group` (None: all ranks); every rank of it must call this."""
    if dist.get_backend(group).lower() != "gloo":
        return StreamAllReducer(group)
    if scope.ranks not in _all_reducers:
        _all_reducers[scope.ranks] = ThreadAllReducer(make_gloo_group(scope))
    return _all_reducers[scope.ranks]


_all_reducers: dict[tuple[int, ...], ThreadAllReducer] = {}
"""One thread and one group serve all synchronizations between the same ranks: a gloo group costs a
connection between each two of them.
"""
