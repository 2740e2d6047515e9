"""Activation recompute: of one call, of one Layer, of selected parts of a model.

`recompute` calls a function and computes its activations again in the backward.
`recompute_wrapper` makes every call of a Layer a `recompute`. `apply_recompute` wraps the sublayers
that a configuration selects.
"""

from paddle_recompute.captured_state import is_recomputing
from paddle_recompute.recompute._hooks import innermost
from paddle_recompute.recompute._observed import observed
from paddle_recompute.recompute._offload import OFFLOADS, InputStorage, SomeOnHost
from paddle_recompute.recompute._storage import PLACES, MakeSlot, Place, Slot, slots
from paddle_recompute.recompute._without_recompute import without_recompute
from paddle_recompute.recompute.function import (
    RecomputeOptions,
    recompute,
    refuse_unknown_options,
    run_recomputed,
)
from paddle_recompute.recompute.kept import keep
from paddle_recompute.recompute.layer import (
    RecomputedFunction,
    RecomputeLayer,
    WrappedLayer,
    forward_count,
    recompute_wrapper,
    replace_class,
)
from paddle_recompute.recompute.layer_selection import (
    RecomputeReport,
    apply_recompute,
    check_patterns,
    grouped,
    keep_parts,
    kept_parts,
    layers_matching,
)
from paddle_recompute.recompute.wrapping import (
    first_wrapped_part,
    passes_input_through,
    undo_recompute,
    wrap_calls,
    wrapped_layers,
)

__all__ = [
    "OFFLOADS",
    "PLACES",
    "InputStorage",
    "MakeSlot",
    "Place",
    "RecomputeLayer",
    "RecomputeOptions",
    "RecomputeReport",
    "RecomputedFunction",
    "Slot",
    "SomeOnHost",
    "WrappedLayer",
    "apply_recompute",
    "check_patterns",
    "first_wrapped_part",
    "forward_count",
    "grouped",
    "innermost",
    "is_recomputing",
    "keep",
    "keep_parts",
    "kept_parts",
    "layers_matching",
    "observed",
    "passes_input_through",
    "recompute",
    "recompute_wrapper",
    "refuse_unknown_options",
    "replace_class",
    "run_recomputed",
    "slots",
    "undo_recompute",
    "without_recompute",
    "wrap_calls",
    "wrapped_layers",
]
