"""Recompute in a Program: boundaries, segments, and the pass that recomputes segments.

`_backend` chooses between the two representations, `pir` and `old_ir`.
"""

from paddle_recompute.recompute.program._backend import backend
from paddle_recompute.recompute.program.boundaries import mark_checkpoint, named
from paddle_recompute.recompute.program.explain import explain
from paddle_recompute.recompute.program.recompute import check_recompute, recompute_segments
from paddle_recompute.recompute.program.report import SegmentInfo, SegmentReport

__all__ = [
    "SegmentInfo",
    "SegmentReport",
    "backend",
    "check_recompute",
    "explain",
    "mark_checkpoint",
    "named",
    "recompute_segments",
]
