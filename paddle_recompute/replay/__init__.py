"""Run a user's function once and repeat it exactly: random streams, flags, buffers."""

from paddle_recompute.replay.call import (
    RECOMPUTATION_ADVICE,
    Call,
    add_note,
    is_recomputing,
    name_of,
)
from paddle_recompute.replay.called_layers import on_every_call
from paddle_recompute.replay.captured_state import CapturedState, layers_of
from paddle_recompute.replay.layer_state import StateAfter
from paddle_recompute.replay.model_stamp import ModelStamp
from paddle_recompute.replay.rng_state import RngReplay, RngState
from paddle_recompute.replay.writes import (
    Stamp,
    is_written_since,
    note_write,
    released,
    stamp,
    stamp_in_place,
    watch_offloaded,
    watch_writes,
)

__all__ = [
    "RECOMPUTATION_ADVICE",
    "Call",
    "CapturedState",
    "ModelStamp",
    "RngReplay",
    "RngState",
    "Stamp",
    "StateAfter",
    "add_note",
    "is_recomputing",
    "is_written_since",
    "layers_of",
    "name_of",
    "note_write",
    "on_every_call",
    "released",
    "stamp",
    "stamp_in_place",
    "watch_offloaded",
    "watch_writes",
]
