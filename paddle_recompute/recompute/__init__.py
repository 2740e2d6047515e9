"""Activation recompute: of one call, of one Layer, of selected parts of a model.

`recompute` calls a function and computes its activations again in the backward.
`recompute_wrapper` makes every call of a Layer a `recompute`. `apply_recompute` wraps the sublayers
that a configuration selects.
"""

from paddle_recompute.recompute._hooks import innermost
from paddle_recompute.recompute._observed import observed
from paddle_recompute.recompute._offload import OFFLOADS, InputStorage, SomeOnHost
from paddle_recompute.recompute._plainly import called_plainly
from paddle_recompute.recompute._storage import PLACES, MakeSlot, Place, Slot, slots
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
from paddle_recompute.recompute.selection import (
    RecomputeReport,
    apply_recompute,
    check_patterns,
    grouped,
    layers_matching,
)
from paddle_recompute.recompute.treatment import (
    hands_on,
    is_treated,
    treat_calls,
    undo_recompute,
    wrapped_layers,
)
from paddle_recompute.replay import is_recomputing

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
    "called_plainly",
    "check_patterns",
    "forward_count",
    "grouped",
    "hands_on",
    "innermost",
    "is_recomputing",
    "is_treated",
    "keep",
    "layers_matching",
    "observed",
    "recompute",
    "recompute_wrapper",
    "refuse_unknown_options",
    "replace_class",
    "run_recomputed",
    "slots",
    "treat_calls",
    "undo_recompute",
    "wrapped_layers",
]
