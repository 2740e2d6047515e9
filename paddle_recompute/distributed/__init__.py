"""Ranks: signs of life, agreement, barriers, broadcasts, collectives that notice a dead peer.

`peers()` connects a rank once to the control server in rank 0 (`control_client`, `control_server`).
What is compared at the start, and who died or failed, goes through it: ``peers().exchange``.
What each step needs goes through collectives of the backend: with gloo in a lane (`gloo_lane`),
on a device on its streams (`waiting_collectives`); a few numbers by `reduce_numbers`, tensors by
`run_collective`. Whoever waits, waits in ``peers().wait_until``, which a dead peer ends.
"""

from paddle_recompute.distributed import stop_request, withdrawals
from paddle_recompute.distributed.agreement import (
    agree_on_options,
    agree_on_parameters,
    agree_on_start,
    first_that_differs,
)
from paddle_recompute.distributed.control_client import (
    is_distributed,
    is_gloo,
    peers,
    scope_of,
)
from paddle_recompute.distributed.digest import Digests
from paddle_recompute.distributed.gathered import gathered
from paddle_recompute.distributed.gloo_lane import Job, are_equal, fingerprint, lane_of
from paddle_recompute.distributed.groups import device_group
from paddle_recompute.distributed.numbers import reduce_numbers
from paddle_recompute.distributed.peer_state import Limits, Scope
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
from paddle_recompute.distributed.sharing import shared_out
from paddle_recompute.distributed.stop_request import StopRequest
from paddle_recompute.distributed.waiting_collectives import watched_on_device

__all__ = [
    "Digests",
    "Job",
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
    "device_group",
    "ends_all_ranks",
    "equal_buffers",
    "fingerprint",
    "first_that_differs",
    "gathered",
    "is_distributed",
    "is_gloo",
    "lane_of",
    "mean_of_array",
    "mean_over_ranks",
    "peers",
    "reduce_numbers",
    "run_collective",
    "scope_of",
    "shared_out",
    "stop_request",
    "sum_over_ranks",
    "values_of_ranks",
    "watched_on_device",
    "withdrawals",
]
