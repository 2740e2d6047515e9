"""Activation recompute: of one call, of one Layer, of selected parts of a model.

`recompute` calls a function and computes its activations again in the backward.
`recompute_wrapper` makes every call of a Layer a `recompute`. `apply_recompute` wraps the sublayers
that a configuration selects.
"""

from paddle_recompute.recompute._plainly import called_plainly, wrapped_layers
from paddle_recompute.recompute.function import recompute
from paddle_recompute.recompute.layer import (
    RecomputedFunction,
    RecomputeLayer,
    forward_count,
    recompute_wrapper,
)
from paddle_recompute.recompute.selection import (
    RecomputeReport,
    apply_recompute,
    check_patterns,
    layers_matching,
)
from paddle_recompute.recompute.treatment import (
    PartOption,
    Unit,
    is_treated,
    offers_its_output,
    parts_of_block,
    treat_calls,
    treat_parts,
    undo_recompute,
)
from paddle_recompute.replay import is_recomputing

__all__ = [
    "PartOption",
    "RecomputeLayer",
    "RecomputeReport",
    "RecomputedFunction",
    "Unit",
    "apply_recompute",
    "called_plainly",
    "check_patterns",
    "forward_count",
    "is_recomputing",
    "is_treated",
    "layers_matching",
    "offers_its_output",
    "parts_of_block",
    "recompute",
    "recompute_wrapper",
    "treat_calls",
    "treat_parts",
    "undo_recompute",
    "wrapped_layers",
]
