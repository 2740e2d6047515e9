"""Ranks: signs of life, agreement, barriers, broadcasts, collectives that notice a dead peer."""

from paddle_recompute.distributed.agreement import (
    agree_on_options,
    agree_on_parameters,
    exchange_long,
    first_that_differs,
)
from paddle_recompute.distributed.control_client import peers
from paddle_recompute.distributed.peer_state import Limits, Scope
from paddle_recompute.distributed.ranks import (
    barrier,
    broadcast_from_rank0,
    is_distributed,
    mean_over_ranks,
    run_collective,
    scope_of,
    values_of_ranks,
)
from paddle_recompute.distributed.stop_request import StopRequest
from paddle_recompute.distributed.watched_collective import Run, run_watched

__all__ = [
    "Limits",
    "Run",
    "Scope",
    "StopRequest",
    "agree_on_options",
    "agree_on_parameters",
    "barrier",
    "broadcast_from_rank0",
    "exchange_long",
    "first_that_differs",
    "is_distributed",
    "mean_over_ranks",
    "peers",
    "run_collective",
    "run_watched",
    "scope_of",
    "values_of_ranks",
]
