"""Ranks: signs of life, agreement, barriers, broadcasts, collectives that notice a dead peer."""

from paddle_recompute.distributed import withdrawals
from paddle_recompute.distributed.agreement import (
    agree_on_options,
    agree_on_parameters,
    first_that_differs,
)
from paddle_recompute.distributed.control_client import peers
from paddle_recompute.distributed.device_group import device_group
from paddle_recompute.distributed.device_watch import watched_on_device
from paddle_recompute.distributed.gloo_lane import lane_of
from paddle_recompute.distributed.host_numbers import reduce_host_numbers
from paddle_recompute.distributed.peer_state import Limits, Scope
from paddle_recompute.distributed.ranks import (
    barrier,
    broadcast_from_rank0,
    buffers_of,
    ends_all_ranks,
    equal_buffers,
    is_distributed,
    mean_over_ranks,
    run_collective,
    scope_of,
    sum_over_ranks,
    values_of_ranks,
)
from paddle_recompute.distributed.stop_request import StopRequest

__all__ = [
    "Limits",
    "Scope",
    "StopRequest",
    "agree_on_options",
    "agree_on_parameters",
    "barrier",
    "broadcast_from_rank0",
    "buffers_of",
    "device_group",
    "ends_all_ranks",
    "equal_buffers",
    "first_that_differs",
    "is_distributed",
    "lane_of",
    "mean_over_ranks",
    "peers",
    "reduce_host_numbers",
    "run_collective",
    "scope_of",
    "sum_over_ranks",
    "values_of_ranks",
    "watched_on_device",
    "withdrawals",
]
