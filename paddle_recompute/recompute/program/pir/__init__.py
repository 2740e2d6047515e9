"""Recompute as a pass over Programs of PIR (Paddle 3.3)."""

from paddle_recompute.recompute.program.pir.apply import (
    prepare,
    recompute_calls,
    recompute_segments,
)
from paddle_recompute.recompute.program.pir.explain import explain
from paddle_recompute.recompute.program.pir.graph import Graph
from paddle_recompute.recompute.program.pir.segments import find_segments

__all__ = [
    "Graph",
    "explain",
    "find_segments",
    "prepare",
    "recompute_calls",
    "recompute_segments",
]
