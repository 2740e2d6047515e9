"""Small agreements between ranks: waiting for each other, equal parameters, mean of a number.

None of them hangs on a peer that has died, stopped or failed: each ends with a `PeerError` that
names it. The limits are those of the newest `GradientSync` of the process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute.distributed.agreement import first_that_differs
from paddle_recompute.distributed.control_client import peers
from paddle_recompute.distributed.device_watch import watched_on_device
from paddle_recompute.distributed.peer_state import Limits, Scope
from paddle_recompute.distributed.watched_collective import run_watched
from paddle_recompute.errors import SyncError

Result = TypeVar("Result")


def is_distributed(group: Group | None = None) -> bool:
    """Whether there is somebody to talk to: a group is set up and has more than one rank."""
    return bool(dist.is_initialized()) and int(dist.get_world_size(group)) > 1


def scope_of(group: Group | None, name: str = "main", limits: Limits | None = None) -> Scope:
    """The ranks of `group` (None: all), as those who wait for each other."""
    ranks = range(dist.get_world_size()) if group is None else group.ranks
    return Scope(tuple(ranks), name, limits or peers().limits)


def barrier(timeout: float = 3600.0) -> None:
    """Wait until every rank is here; returns at once in a single process.

    The ranks wait in no collective: gloo gives up a collective after 30 s, which is less than a
    rank-0-only evaluation or checkpoint may take.

    Args:
        timeout: Seconds to wait for the slowest rank, as long as it shows signs of life.

    Raises:
        PeerError: Some rank did not come in time, or has died, stopped or failed.
        SyncError: Another rank is not at a barrier.
    """
    if is_distributed():
        scope = scope_of(None)
        limits = dataclasses.replace(scope.limits, stall_timeout=timeout)
        peers().exchange(None, "barrier()", dataclasses.replace(scope, limits=limits))


def run_collective(function: Callable[[], Result], what: str, group: Group | None = None) -> Result:
    """The result of ``function()``, which calls collectives between the ranks of `group`.

    With gloo it begins when all ranks are here, so that none waits for a late one longer than gloo
    does, and a peer that dies or stops meanwhile ends it with an error that names the peer. Costs
    about 0.4 ms. With the backends of devices it is begun only, and the host goes on; where it
    waits for a peer that has died or stopped, another thread ends the process with that error. In
    a single process the function is just called.

    Args:
        function: The collectives; the same on every rank. With gloo it runs in another thread,
            while this one waits, so it must not depend on the thread's grad mode or AMP state.
        what: Names them, for messages; the same on every rank.
        group: The ranks; None is all of them.

    Raises:
        PeerError: A rank has died, stopped or failed, or a collective failed.
        SyncError: Another rank does something else.
    """
    if not is_distributed(group):
        return function()
    if dist.get_backend(group).lower() == "gloo":
        return run_watched(function, what, scope_of(group))
    with watched_on_device(what, scope_of(group)):
        return function()


def broadcast_from_rank0(model: paddle.nn.Layer, group: Group | None = None) -> None:
    """Make parameters and buffers of `model` on all ranks those of rank 0, and check that they are.

    Args:
        model: The same Layer on every rank (same names, shapes and dtypes, in the same order).
        group: The ranks; None is all of them.

    Raises:
        SyncError: A tensor still differs afterwards; the message names the first one.
        PeerError: A rank has died, stopped or failed.
    """
    if not is_distributed(group):
        return
    scope = scope_of(group)
    tensors = dict(_tensors_of(model))

    def broadcast_all() -> None:
        with paddle.no_grad():
            for tensor in tensors.values():
                dist.broadcast(tensor, src=scope.ranks[0], group=group)

    what = f"the broadcast of {len(tensors)} tensors from rank 0"
    run_collective(broadcast_all, what, group)
    difference = first_that_differs(list(tensors.values()), scope)
    if difference is not None:
        index, ranks = difference
        raise SyncError(
            f"after the broadcast from rank 0, '{list(tensors)[index]}' on rank "
            f"{', '.join(map(str, ranks))} is not what the others have; is the model built in the "
            "same way everywhere?"
        )


def mean_over_ranks(value: float, group: Group | None = None) -> float:
    """The mean of a number over the ranks of `group`, the same bits on all; about 0.2 ms.

    Raises:
        PeerError: A rank has died, stopped or failed.
        SyncError: Another rank does something else.
    """
    if not is_distributed(group):
        return value
    values = peers().exchange(float(value), "mean_over_ranks()", scope_of(group))
    return math.fsum(values) / len(values)


def values_of_ranks(value: Any, what: str, group: Group | None = None) -> list[Any]:
    """The `value` (for JSON) of every rank of `group`, in rank order; about 0.2 ms.

    Args:
        value: Of this rank; it may differ.
        what: Names the exchange, for messages; the same on every rank.
        group: The ranks; None is all of them.

    Raises:
        PeerError: A rank has died, stopped or failed.
        SyncError: Another rank does something else.
    """
    if not is_distributed(group):
        return [value]
    return peers().exchange(value, what, scope_of(group))


def _tensors_of(model: paddle.nn.Layer) -> Iterator[tuple[str, paddle.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
