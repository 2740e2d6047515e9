"""One call of a user's function and its exact repetition: random streams, flags, buffers."""

from paddle_recompute.replay.call import Call, describe, dtype_name, is_recomputing, name_of
from paddle_recompute.replay.layer_state import layers_of
from paddle_recompute.replay.random_streams import RngState
from paddle_recompute.replay.replay_state import Moment, StateWatch

__all__ = [
    "Call",
    "Moment",
    "RngState",
    "StateWatch",
    "describe",
    "dtype_name",
    "is_recomputing",
    "layers_of",
    "name_of",
]
