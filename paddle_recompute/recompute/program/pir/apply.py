"""Choose the segments of a Program that has its backward, warn of poor ones, and apply the pass."""

from __future__ import annotations

import paddle

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation
from paddle_recompute.recompute.program.pir.bfloat16 import ask_for_both_gradients
from paddle_recompute.recompute.program.pir.detached import copy_detached
from paddle_recompute.recompute.program.pir.graph import Graph
from paddle_recompute.recompute.program.pir.recompute import recompute
from paddle_recompute.recompute.program.pir.segments import (
    find_segments,
    warn_of_crossings,
    warn_of_marks_inside,
)


def prepare(program: paddle.static.Program) -> None:
    """Make `program` ready for its backward, which is appended afterwards."""
    copy_detached(program)
    ask_for_both_gradients(program)
    pir.claim_recomputed_calls(program)


def recompute_calls(program: paddle.static.Program, num_forward: int) -> None:
    """Recompute every recomputed call in a Program that `paddle.jit.to_static` made.

    Args:
        program: With its backward.
        num_forward: How many of its operators are not backward.
    """
    recompute_segments(program, pir.operations(program)[num_forward - 1], ())


def recompute_segments(
    program: paddle.static.Program, last_forward: Operation, names: tuple[str, ...]
) -> None:
    """Recompute the segments that `names` select.

    Args:
        program: With its backward.
        last_forward: Its last operator that is not backward.
        names: As in `find_segments`.
    """
    graph = Graph(program, last_forward)
    segments = find_segments(graph, names)
    warn_of_marks_inside(segments, graph, names)
    warn_of_crossings(segments, graph)
    recompute(graph, segments)
