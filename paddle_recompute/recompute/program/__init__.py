"""Recompute in a Program: boundaries, segments, and the pass that recomputes segments.

While a Program is built, `boundaries` and `marked_call` mark its operators. `recompute_segments`
reads it as a `Graph`, after its backward was appended; `segments` finds what is recomputed together
and what each segment keeps; `plan` chooses which operators are copied, and where to; `carry_out`
inserts the copies. `_backend` chooses the representation, `pir` or `old_ir`, which has its own
`Graph` and `carry_out`; which operators may run twice is decided once, in `operators`.
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
