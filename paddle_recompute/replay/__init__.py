"""Run a user's function once and repeat it exactly: random streams, flags, buffers."""

from paddle_recompute.replay.call import REPETITION_ADVICE, Call, is_recomputing, name_of
from paddle_recompute.replay.called_layers import on_every_call
from paddle_recompute.replay.layer_state import StateAfter
from paddle_recompute.replay.model_stamp import ModelStamp
from paddle_recompute.replay.random_streams import Draws, RngState
from paddle_recompute.replay.reach import Reach, layers_of
from paddle_recompute.replay.writes import (
    Stamp,
    is_written_since,
    note_write,
    released,
    stamp,
    stamp_in_place,
    travels,
    watch_writes,
)

__all__ = [
    "REPETITION_ADVICE",
    "Call",
    "Draws",
    "ModelStamp",
    "Reach",
    "RngState",
    "Stamp",
    "StateAfter",
    "is_recomputing",
    "is_written_since",
    "layers_of",
    "name_of",
    "note_write",
    "on_every_call",
    "released",
    "stamp",
    "stamp_in_place",
    "travels",
    "watch_writes",
]
