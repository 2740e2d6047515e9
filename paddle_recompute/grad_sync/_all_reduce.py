"""All-reduces that run beside the backward: a thread on gloo, the communication stream on GPUs."""

from __future__ import annotations

from typing import Any, Protocol

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute.distributed import is_gloo, lane_of, scope_of, watched_on_device

LANE = "gradients"
"""That of the buckets, with gloo."""


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


class AllReducer:
    """Sums tensors over the ranks, in the order in which it is given them.

    With gloo in a thread: its collectives ignore ``sync_op=False`` but let go of the GIL (2.6,
    3.3). With NCCL and other backends of devices on the communication stream: the host waits for no
    bucket and nothing else that a rank computes.

    Args:
        group: The ranks; None is all of them. Every one of them must make this.
        lane: The name of the lane in which they are sent with gloo; the same on all ranks.
    """

    def __init__(self, group: Group | None, lane: str = LANE) -> None:
        self._group = group
        self._scope = scope_of(group)
        self._lane = lane
        self.is_gloo = is_gloo(group)
        if self.is_gloo:
            lane_of(self._scope, lane)  # made now, and not in the first step

    def send(self, tensor: paddle.Tensor, label: str, *, has_met: bool = False) -> AllReduceTask:
        """Begin to sum `tensor` in place over the ranks, and return at once.

        Args:
            tensor: The same shape and dtype on every rank.
            label: What it is, as in `ControlClient.wait_until`; the same on every rank.
            has_met: Whether the ranks have just agreed that this comes next; see `GlooLane.begin`.
        """
        if self.is_gloo:
            return lane_of(self._scope, self._lane).begin(
                lambda group: dist.all_reduce(tensor, group=group),
                label,
                code=f"{tensor.shape} x {tensor.dtype}",
                has_met=has_met,
            )
        with watched_on_device(label, self._scope):
            return _StreamTask(dist.all_reduce(tensor, group=self._group, sync_op=False))


class _StreamTask:
    started: float | None = None
    ended: float | None = None

    def __init__(self, task: Any) -> None:
        self._task = task

    def wait(self) -> None:
        self._task.wait()  # the stream that computes waits, the host does not
