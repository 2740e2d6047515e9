"""A few numbers that the hosts know, reduced over the ranks: sums, largest, whether all are equal.

With gloo they are sent in a lane (`gloo_lane`). On a device they have a group and a stream of their
own, so a host waits for the other hosts, and for nothing that the device computes. It polls
meanwhile: a peer that died would leave it waiting inside the driver, for ever.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.device import HostNumbers
from paddle_recompute._paddle.distributed import all_reduce_numbers
from paddle_recompute.distributed.connection import is_gloo, peers, scope_of
from paddle_recompute.distributed.gloo_lane import MAIN_LANE, MOST_SUMMED, QueuedCollective, lane_of
from paddle_recompute.distributed.groups import device_group
from paddle_recompute.distributed.waiting_collectives import watched_on_device


def reduce_numbers(
    values: Sequence[float],
    operation: str,
    what: str,
    group: Group | None = None,
    *,
    lane: str = MAIN_LANE,
) -> list[float]:
    """Each of `values`, reduced over the ranks of `group` in float64: bitwise identical on all.

    Also while a Program is built; nothing goes through rank 0. Every rank must call it equally
    often, in the order of its other collectives.

    Args:
        values: As many on every rank.
        operation: ``"sum"``, ``"min"`` or ``"max"``.
        what: Names them, for messages; the same on every rank.
        group: The ranks; None is all of them.
        lane: The one in which gloo sends them.

    Raises:
        PeerError: A rank has died, stopped, failed, or not come in time.
        SyncError: Another rank does something else.
    """
    if not values:
        return []
    scope = scope_of(group)
    if is_gloo(group):
        code = f"{len(values)} numbers"
        if operation == "sum" and len(values) <= MOST_SUMMED:
            summed: QueuedCollective[list[float]] = lane_of(scope, lane).begin(
                None, what, code=code, numbers=values
            )
            return summed.wait()
        job = lane_of(scope, lane).begin(
            lambda own: all_reduce_numbers(own, list(values), operation), what, code=code
        )
        return job.wait()
    if not paddle.in_dynamic_mode():
        with watched_on_device(what, scope):
            return all_reduce_numbers(group or dist.get_group(0), list(values), operation)
    beside = device_group(scope.ranks, "the numbers of the hosts")
    reduction = getattr(dist.ReduceOp, operation.upper())
    sent = HostNumbers(
        values,
        lambda tensor: dist.all_reduce(tensor, reduction, group=beside, sync_op=False).wait(),
    )

    def wait_for(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not sent.has_come():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.0001)
        return True

    peers().wait_until(wait_for, what, scope)
    return sent.values()
