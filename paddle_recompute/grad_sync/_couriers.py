"""All-reduces that run beside the backward: a thread on gloo, the communication stream on GPUs."""

from __future__ import annotations

import functools
import queue
import threading
import time
from typing import Any, Protocol

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute.grad_sync.ranks import barrier


class Delivery(Protocol):
    """An all-reduce under way."""

    started: float | None
    """When the all-reduce began (``time.perf_counter``); None: not yet, or unknown to the host."""
    ended: float | None
    """When it ended."""

    def wait(self) -> None:
        """Return when the tensor holds the sum over all ranks; raise what went wrong."""


class Courier(Protocol):
    """Sums tensors over the ranks, in the order in which it is given them."""

    def send(self, tensor: paddle.Tensor) -> Delivery:
        """Begin to sum `tensor` in place over all ranks, and return at once."""


class _Parcel:
    def __init__(self, tensor: paddle.Tensor) -> None:
        self.tensor = tensor
        self.started: float | None = None
        self.ended: float | None = None
        self._done = threading.Event()
        self._error: BaseException | None = None

    def deliver(self, group: Group, earlier: BaseException | None) -> BaseException | None:
        """Sum the tensor; after an `earlier` failure the ranks are out of step and none goes."""
        try:
            if earlier is not None:
                raise earlier
            self.started = time.perf_counter()
            dist.all_reduce(self.tensor, group=group)
            self.ended = time.perf_counter()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
        return self._error

    def wait(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


class ThreadCourier:
    """For gloo, whose collectives ignore ``sync_op=False`` but let go of the GIL (2.6, 3.3).

    One thread, with a group of its own that nobody else uses: two threads in one gloo group give
    wrong sums without a word.
    """

    def __init__(self, ranks: list[int]) -> None:
        # Without a rendezvous first, new_group refuses connections on more than two ranks
        # (2.6.2, 3.3.1): some rank may not listen yet.
        barrier()
        self._group = dist.new_group(ranks)
        self._parcels: queue.SimpleQueue[_Parcel] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_deliver_all, args=(self._parcels, self._group), name="gradients", daemon=True
        )
        self._thread.start()

    def send(self, tensor: paddle.Tensor) -> Delivery:
        parcel = _Parcel(tensor)
        self._parcels.put(parcel)
        return parcel


def _deliver_all(parcels: queue.SimpleQueue[_Parcel], group: Group) -> None:
    error: BaseException | None = None
    while True:
        error = parcels.get().deliver(group, error)


class _OnStream:
    started: float | None = None
    ended: float | None = None

    def __init__(self, task: Any) -> None:
        self._task = task

    def wait(self) -> None:
        self._task.wait()


class StreamCourier:
    """For NCCL and other device backends: asynchronous collectives on the communication stream."""

    def __init__(self, group: Group | None) -> None:
        self._group = group

    def send(self, tensor: paddle.Tensor) -> Delivery:
        return _OnStream(dist.all_reduce(tensor, group=self._group, sync_op=False))


def courier_of(group: Group | None) -> Courier:
    """The courier for the backend of `group` (None: all ranks). Every rank must call this."""
    if dist.get_backend(group).lower() == "gloo":
        ranks = range(dist.get_world_size()) if group is None else group.ranks
        return _thread_courier(tuple(ranks))
    return StreamCourier(group)


@functools.cache
def _thread_courier(ranks: tuple[int, ...]) -> ThreadCourier:
    """One thread and one group serve all synchronizations between the same ranks: a gloo group
    costs a connection between each two of them.
    """
    return ThreadCourier(list(ranks))
