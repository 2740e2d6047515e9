"""Ranks: signs of life, agreement, barriers, broadcasts, collectives that notice a dead peer.

`peers()` connects a rank once to the control server in rank 0 (`connection`, `control_client`,
`control_link`, `control_server`), `connect_early()` before Paddle is imported (`rendezvous`). How a
rank says that it has failed or ended is in `shutdown`.
What is compared at the start, and who died or failed, goes through it: ``peers().exchange``.
What each step needs goes through collectives of the backend: with gloo in a lane (`gloo_lane`),
on a device on its streams (`waiting_collectives`); a few numbers by `reduce_numbers`, tensors by
`run_collective`. Whoever waits, waits in ``peers().wait_until``, which a dead peer ends.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paddle_recompute.distributed.peer_state import Limits, Scope
from paddle_recompute.distributed.rendezvous import connect_early, connected_early

if TYPE_CHECKING:
    from paddle_recompute.distributed import collective_fallback, stop_request
    from paddle_recompute.distributed.agreement import (
        agree_on_options,
        agree_on_parameters,
        agree_on_start,
        differences,
        first_that_differs,
    )
    from paddle_recompute.distributed.connection import (
        connect_ranks,
        is_distributed,
        is_gloo,
        join_process_group,
        peers,
        scope_of,
    )
    from paddle_recompute.distributed.digest import Digests
    from paddle_recompute.distributed.gathering import gathered
    from paddle_recompute.distributed.gloo_lane import (
        are_equal,
        fingerprint,
        lane_of,
    )
    from paddle_recompute.distributed.groups import device_group
    from paddle_recompute.distributed.numbers import reduce_numbers
    from paddle_recompute.distributed.owners import owner_ranks, parts_of_owners
    from paddle_recompute.distributed.ranks import (
        barrier,
        broadcast_from_rank0,
        broadcast_tensors,
        buffers_of,
        ends_all_ranks,
        equal_buffers,
        mean_of_array,
        mean_over_ranks,
        run_collective,
        sum_over_ranks,
        values_of_ranks,
    )
    from paddle_recompute.distributed.stop_request import StopRequest
    from paddle_recompute.distributed.waiting_collectives import watched_on_device

__all__ = [
    "Digests",
    "Limits",
    "Scope",
    "StopRequest",
    "agree_on_options",
    "agree_on_parameters",
    "agree_on_start",
    "are_equal",
    "barrier",
    "broadcast_from_rank0",
    "broadcast_tensors",
    "buffers_of",
    "collective_fallback",
    "connect_early",
    "connect_ranks",
    "connected_early",
    "device_group",
    "differences",
    "ends_all_ranks",
    "equal_buffers",
    "fingerprint",
    "first_that_differs",
    "gathered",
    "is_distributed",
    "is_gloo",
    "join_process_group",
    "lane_of",
    "mean_of_array",
    "mean_over_ranks",
    "owner_ranks",
    "parts_of_owners",
    "peers",
    "reduce_numbers",
    "run_collective",
    "scope_of",
    "stop_request",
    "sum_over_ranks",
    "values_of_ranks",
    "watched_on_device",
]


_WITH_PADDLE = (
    "agreement", "connection", "digest", "gathering", "gloo_lane", "groups", "numbers", "ranks",
    "owners", "stop_request", "waiting_collectives",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import what needs Paddle when it is first used (PEP 562): a rank connects before that."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module in _WITH_PADDLE if name not in ("stop_request", "collective_fallback") else ():
        found = importlib.import_module(f"{__name__}.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    return importlib.import_module(f"{__name__}.{name}")
