"""Capture the state that a function reads, and restore it for the recomputation.

`Call` runs a function and recomputes it. Its state is captured by `captured_state` (closures,
globals, attributes), `layer_state` (buffers, parameters) and `rng_state`; `writes` detects tensors
that were written to in between.
"""

from paddle_recompute.captured_state.call import RECOMPUTATION_ADVICE, Call, is_recomputing, name_of
from paddle_recompute.captured_state.called_layers import on_every_call
from paddle_recompute.captured_state.captured_state import CapturedState, layers_of
from paddle_recompute.captured_state.layer_state import StateAfter
from paddle_recompute.captured_state.model_stamp import ModelStamp
from paddle_recompute.captured_state.rng_state import RngSnapshot, RngState
from paddle_recompute.captured_state.writes import (
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
    "RngSnapshot",
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
    "watch_offloaded",
    "watch_writes",
]
