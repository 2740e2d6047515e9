"""Recompute in a Program: boundaries, segments, the pass over each representation."""

from paddle_recompute.recompute.program.boundaries import mark_checkpoint, named
from paddle_recompute.recompute.program.report import SegmentInfo, SegmentReport

__all__ = [
    "SegmentInfo",
    "SegmentReport",
    "mark_checkpoint",
    "named",
]
