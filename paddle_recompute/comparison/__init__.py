"""Compare two runs: which arrays differ, and how much they may."""

from paddle_recompute.comparison.arrays import (
    EXACT,
    Array,
    Difference,
    Precision,
    Rounding,
    Seen,
    Tolerance,
    differences,
    largest,
)

__all__ = [
    "EXACT",
    "Array",
    "Difference",
    "Precision",
    "Rounding",
    "Seen",
    "Tolerance",
    "differences",
    "largest",
]
