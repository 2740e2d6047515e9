"""Run a user's function once and repeat it exactly: random streams, flags, buffers."""

from paddle_recompute.replay.call import REPETITION_ADVICE, Call, is_recomputing, name_of
from paddle_recompute.replay.called_layers import on_every_call
from paddle_recompute.replay.random_streams import RngState
from paddle_recompute.replay.reach import layers_of
from paddle_recompute.replay.replay_state import ReplayState, StateWatch
from paddle_recompute.replay.writes import (
    Stamp,
    is_written_since,
    stamp,
    stamp_in_place,
    travels,
    watch_writes,
)

__all__ = [
    "REPETITION_ADVICE",
    "Call",
    "ReplayState",
    "RngState",
    "Stamp",
    "StateWatch",
    "is_recomputing",
    "is_written_since",
    "layers_of",
    "name_of",
    "on_every_call",
    "stamp",
    "stamp_in_place",
    "travels",
    "watch_writes",
]
