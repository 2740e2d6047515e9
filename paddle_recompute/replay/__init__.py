"""Run a user's function once and repeat it exactly: random streams, flags, buffers."""

from paddle_recompute.replay.call import REPETITION_ADVICE, Call, is_recomputing, name_of
from paddle_recompute.replay.called_layers import on_every_call
from paddle_recompute.replay.comparison import (
    GRADIENT_OF,
    LATER,
    DygraphRun,
    Occasions,
    compare,
    cotangent,
    draws_elsewhere,
    isolated,
    moved,
    on_host,
)
from paddle_recompute.replay.model_state import ModelStamp, ModelState, alias, clone
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
    "GRADIENT_OF",
    "LATER",
    "REPETITION_ADVICE",
    "Call",
    "Draws",
    "DygraphRun",
    "ModelStamp",
    "ModelState",
    "Occasions",
    "Reach",
    "RngState",
    "Stamp",
    "alias",
    "clone",
    "compare",
    "cotangent",
    "draws_elsewhere",
    "is_recomputing",
    "is_written_since",
    "isolated",
    "layers_of",
    "moved",
    "name_of",
    "note_write",
    "on_every_call",
    "on_host",
    "released",
    "stamp",
    "stamp_in_place",
    "travels",
    "watch_writes",
]
