"""Activation recompute that is right in every case: one function, one Layer, one selection.

`recompute` calls a function so that its activations are computed again in the backward;
`recompute_wrapper` does it to a Layer for good; `apply_recompute` to the sublayers of a model that
a configuration names.
"""

from paddle_recompute.recompute.function import recompute
from paddle_recompute.recompute.layer import (
    RecomputedFunction,
    RecomputeLayer,
    forward_count,
    recompute_wrapper,
)
from paddle_recompute.recompute.selection import RecomputeReport, apply_recompute
from paddle_recompute.replay import is_recomputing

__all__ = [
    "RecomputeLayer",
    "RecomputeReport",
    "RecomputedFunction",
    "apply_recompute",
    "forward_count",
    "is_recomputing",
    "recompute",
    "recompute_wrapper",
]
