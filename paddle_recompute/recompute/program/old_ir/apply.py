"""Choose the segments of a Program that has its backward, warn of poor ones, and apply the pass."""

from __future__ import annotations

from collections.abc import Collection, Container

import paddle

from paddle_recompute.recompute.program.old_ir.graph import Graph
from paddle_recompute.recompute.program.old_ir.recompute import recompute
from paddle_recompute.recompute.program.old_ir.segments import find_segments, warn_of_crossings


def recompute_segments(
    program: paddle.static.Program, earlier: Container[int], names: Collection[str]
) -> None:
    """Recompute the segments that `names` select.

    Args:
        program: With its backward.
        earlier: As in `Graph`.
        names: As in `find_segments`.
    """
    graph = Graph(program, earlier=earlier)
    segments = find_segments(graph, names)
    warn_of_crossings(segments, graph)
    recompute(graph, segments)
