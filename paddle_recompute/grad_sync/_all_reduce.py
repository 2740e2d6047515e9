"""All-reduces that run beside the backward: a thread on gloo, the communication stream on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle import device
from paddle_recompute.distributed import Scope, lane_of, reduce_host_numbers, watched_on_device

_LANE = "gradients"


class AllReduceTask(Protocol):
    """An all-reduce under way."""

    started: float | None
    """When the all-reduce began (``time.perf_counter``); None: not yet, or unknown to the host."""
    ended: float | None
    """When it ended."""

    def wait(self) -> object:
        """Return when what is computed next finds the sum in the tensor; raise what went wrong.

        On a device the host does not wait for that, the device does.
        """


class AllReducer(Protocol):
    """Sums tensors over the ranks, in the order in which it is given them."""

    def send(self, tensor: paddle.Tensor, label: str, scope: Scope, place: str) -> AllReduceTask:
        """Begin to sum `tensor` in place over the ranks of `scope`, and return at once.

        Args:
            tensor: The same shape and dtype on every rank.
            label: What it is, for messages; the same on every rank.
            scope: Whose death ends the wait for it.
            place: The part of the program, as in `ControlClient.wait`.
        """

    def sums(
        self, numbers: Sequence[float], own: paddle.Tensor, label: str, scope: Scope
    ) -> tuple[list[float], paddle.Tensor]:
        """The sums over the ranks of `numbers`, which it waits for, and of what is in `own`.

        Args:
            numbers: As many on every rank.
            own: Float64, ``[n]``, which need not have been computed yet. On a device, the host does
                not wait for it.
            label: As of `send`.
            scope: As of `send`.
        """

    def largest(self, numbers: Sequence[float], label: str, scope: Scope) -> list[float]:
        """The largest over the ranks of each of `numbers`, as many on every rank."""


class ThreadAllReducer:
    """For gloo, whose collectives ignore ``sync_op=False`` but let go of the GIL (2.6, 3.3).

    Args:
        name: That of its lane; the same on all ranks.
    """

    def __init__(self, name: str = _LANE) -> None:
        self._name = name

    def send(self, tensor: paddle.Tensor, label: str, scope: Scope, place: str) -> AllReduceTask:
        return lane_of(scope, self._name).begin(
            lambda group: dist.all_reduce(tensor, group=group),
            label,
            scope,
            place=place,
            code=f"{tensor.size} x {tensor.dtype}",
        )

    def sums(
        self, numbers: Sequence[float], own: paddle.Tensor, label: str, scope: Scope
    ) -> tuple[list[float], paddle.Tensor]:
        joined = paddle.concat([device.put(list(map(float, numbers)), "float64"), own])
        self._reduce(joined, dist.ReduceOp.SUM, label, scope)
        return joined[: len(numbers)].tolist(), joined[len(numbers) :]

    def largest(self, numbers: Sequence[float], label: str, scope: Scope) -> list[float]:
        if not numbers:  # gloo refuses to reduce nothing
            return []
        tensor = device.put(list(map(float, numbers)), "float64")
        self._reduce(tensor, dist.ReduceOp.MAX, label, scope)
        return [float(value) for value in tensor.tolist()]

    def _reduce(self, numbers: paddle.Tensor, operation: int, label: str, scope: Scope) -> None:
        def reduce(group: Group) -> None:
            dist.all_reduce(numbers, operation, group=group)

        place = label.partition(":")[0]
        code = f"{numbers.size} numbers"
        lane_of(scope, self._name).begin(reduce, label, scope, place=place, code=code).wait()


class _StreamTask:
    started: float | None = None
    ended: float | None = None

    def __init__(self, task: Any) -> None:
        self._task = task

    def wait(self) -> None:
        self._task.wait()  # the stream that computes waits, the host does not


class StreamAllReducer:
    """For NCCL and other device backends: asynchronous collectives on the communication stream.

    The host waits for no bucket and nothing else that a rank computes: at the end of the step it
    waits for the numbers of the other hosts.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = group

    def send(self, tensor: paddle.Tensor, label: str, scope: Scope, place: str) -> AllReduceTask:
        with watched_on_device(label, scope):
            return _StreamTask(dist.all_reduce(tensor, group=self._group, sync_op=False))

    def sums(
        self, numbers: Sequence[float], own: paddle.Tensor, label: str, scope: Scope
    ) -> tuple[list[float], paddle.Tensor]:
        if own.size:
            self.send(own, label, scope, label).wait()
        return reduce_host_numbers(numbers, dist.ReduceOp.SUM, label, scope), own

    def largest(self, numbers: Sequence[float], label: str, scope: Scope) -> list[float]:
        return reduce_host_numbers(numbers, dist.ReduceOp.MAX, label, scope)


def all_reducer_of(group: Group | None, scope: Scope) -> AllReducer:
    """The courier for the backend of `group` (None: all ranks); every rank of it must call this."""
    if dist.get_backend(group).lower() != "gloo":
        return StreamAllReducer(group)
    lane_of(scope, _LANE)  # made now, and not in the first step
    return ThreadAllReducer()
