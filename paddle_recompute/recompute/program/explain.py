"""`explain`: the segments of a Program, counted."""

from __future__ import annotations

import paddle

from paddle_recompute._paddle.static.attributes import COPY_OF
from paddle_recompute.recompute.program._backend import backend
from paddle_recompute.recompute.program.graph import Graph
from paddle_recompute.recompute.program.report import SegmentInfo, SegmentReport
from paddle_recompute.recompute.program.segments import (
    ProgramSegment,
    applied_segments,
    crossing_variables,
    find_segments,
)


def explain(program: paddle.static.Program) -> SegmentReport:
    """The recompute segments of `program`: operators, and bytes kept for the backward.

    Args:
        program: Before or after `static_graph.minimize`; before it, the bytes kept for the backward
            are unknown.

    Returns:
        A report whose ``str`` is a table.

    Raises:
        StaticGraphError: The Program has no recompute boundaries.
    """
    graph = backend().Graph(program)
    applied = applied_segments(graph)
    segments = applied or find_segments(graph)
    is_trained = bool(applied and graph.backward)
    last = max(segment.positions[-1] for segment in segments)
    return SegmentReport(
        segments=tuple(_info(segment, graph, is_trained=is_trained) for segment in segments),
        num_ops_after=sum(position > last for position in graph.forward),
        unknown_sizes=any(
            graph.has_unknown_size(name) for p in graph.forward for name in graph.outputs(p)
        ),
    )


def _info(segment: ProgramSegment, graph: Graph, *, is_trained: bool) -> SegmentInfo:
    crossing = crossing_variables(segment, graph)
    kept = {
        name
        for position in segment.positions
        for name in graph.outputs(position)
        if not graph.is_given(name) and graph.value_readers(name)
    }
    copies = [p for p in graph.backward if graph.text(p, COPY_OF) == segment.name]
    return SegmentInfo(
        name=segment.name,
        num_ops=len(segment.positions),
        num_recomputed=len(copies) if is_trained else None,
        kept_bytes=sum(map(graph.num_bytes, kept)) if is_trained else None,
        crossing=len(crossing),
        crossing_bytes=sum(map(graph.num_bytes, crossing)),
        kept_ops={
            graph.kind(position): why
            for position in segment.positions
            if (why := graph.why_kept(position)) is not None
        },
    )
