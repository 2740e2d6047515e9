"""Run A, run B from the same state, list what differs: outputs, gradients, buffers, streams.

`arrays` says which arrays of two runs differ, and how much they may; `model_state` keeps a model as
it is around the runs; `runs` compares a Program with dygraph.
"""

from paddle_recompute.comparison.arrays import (
    EXACT,
    Array,
    Precision,
    Rounding,
    Seen,
    Tolerance,
    differences,
    largest,
)
from paddle_recompute.comparison.model_state import ModelState, StepState, alias, clone
from paddle_recompute.comparison.runs import (
    GRADIENT_OF,
    LATER,
    DifferenceError,
    Occasions,
    Run,
    compare,
    cotangent,
    displaced,
    draws_elsewhere,
    isolated,
    moved,
    on_host,
)

__all__ = [
    "EXACT",
    "GRADIENT_OF",
    "LATER",
    "Array",
    "DifferenceError",
    "ModelState",
    "Occasions",
    "Precision",
    "Rounding",
    "Run",
    "Seen",
    "StepState",
    "Tolerance",
    "alias",
    "clone",
    "compare",
    "cotangent",
    "differences",
    "displaced",
    "draws_elsewhere",
    "isolated",
    "largest",
    "moved",
    "on_host",
]
