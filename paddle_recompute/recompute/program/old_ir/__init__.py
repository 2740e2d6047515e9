"""Recompute as a pass over Programs of the old representation (Paddle 2.6)."""

from paddle_recompute.recompute.program.old_ir.apply import recompute_segments
from paddle_recompute.recompute.program.old_ir.detached import copy_detached
from paddle_recompute.recompute.program.old_ir.explain import explain
from paddle_recompute.recompute.program.old_ir.graph import Graph
from paddle_recompute.recompute.program.old_ir.segments import find_segments

__all__ = ["Graph", "copy_detached", "explain", "find_segments", "recompute_segments"]
