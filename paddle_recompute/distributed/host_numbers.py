"""Numbers that the hosts know, reduced over the ranks of a device's backend.

They have a group and a stream of their own, so a host waits for the other hosts, and for nothing
that the device computes. It polls meanwhile: a peer that died would leave it waiting inside the
driver, for ever.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import paddle
import paddle.distributed as dist

from paddle_recompute._paddle.device import HostNumbers
from paddle_recompute.distributed.control_client import peers
from paddle_recompute.distributed.device_group import device_group
from paddle_recompute.distributed.peer_state import Scope


def reduce_host_numbers(
    numbers: Sequence[float],
    operation: int,
    label: str,
    scope: Scope,
) -> list[float]:
    """Each of `numbers`, reduced over the ranks; not for gloo, which has no streams.

    Every rank must call it equally often, in the order of its other collectives.

    Args:
        numbers: As many on every rank; float64.
        operation: ``dist.ReduceOp.SUM`` or another.
        label: What they are, for messages.
        scope: The ranks.

    Raises:
        PeerError: A rank has died, stopped, failed, or not come in time.
    """
    if not numbers:
        return []
    beside = device_group(scope.ranks, "the numbers of the hosts")

    def reduce(tensor: paddle.Tensor) -> None:
        dist.all_reduce(tensor, operation, group=beside, sync_op=False).wait()

    sent = HostNumbers(numbers, reduce)
    place = label.partition(":")[0]
    peers().wait_until(partial(_has_come, sent), label, scope, place=place)
    return sent.values()


def _has_come(numbers: HostNumbers, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not numbers.has_come():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.0001)
    return True
