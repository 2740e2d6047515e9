"""Activation recompute: of one call, of one Layer, of selected parts of a model.

`recompute` calls a function and computes its activations again in the backward.
`recompute_wrapper` makes every call of a Layer a `recompute`. `apply_recompute` wraps the sublayers
that a configuration selects.
"""

from paddle_recompute.recompute._hooks import innermost
from paddle_recompute.recompute._offload import OFFLOADS, InputStorage, Kept
from paddle_recompute.recompute.function import recompute
from paddle_recompute.recompute.layer import (
    RecomputedFunction,
    RecomputeLayer,
    forward_count,
    recompute_wrapper,
)
from paddle_recompute.recompute.selection import RecomputeReport, apply_recompute, check_patterns
from paddle_recompute.replay import is_recomputing

__all__ = [
    "OFFLOADS",
    "InputStorage",
    "Kept",
    "RecomputeLayer",
    "RecomputeReport",
    "RecomputedFunction",
    "apply_recompute",
    "check_patterns",
    "forward_count",
    "innermost",
    "is_recomputing",
    "recompute",
    "recompute_wrapper",
]
