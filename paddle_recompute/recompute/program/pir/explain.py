"""`explain` for PIR: the segments of a Program, counted."""

from __future__ import annotations

import dataclasses
import itertools

import paddle

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation, Value
from paddle_recompute.recompute.program.pir.graph import Graph
from paddle_recompute.recompute.program.pir.operators import why_kept
from paddle_recompute.recompute.program.pir.recompute import COPY_OF, FIRST_BACKWARD
from paddle_recompute.recompute.program.pir.segments import (
    Segment,
    applied_segments,
    crossing_values,
    find_segments,
)
from paddle_recompute.recompute.program.report import SegmentInfo, SegmentReport


def explain(program: paddle.static.Program) -> SegmentReport:
    """As `static_graph.explain`."""
    last = _last_forward(program)
    graph = Graph(program, last)
    segments = applied_segments(graph) or find_segments(graph)
    inside = {member for segment in segments for member in segment.members}
    end = max(graph.position(segment.operations[-1]) for segment in segments)
    after = [one for one in graph.forward[end + 1 :] if one.name() not in pir.SOURCES]
    return SegmentReport(
        segments=tuple(_info(segment, graph, bool(graph.backward)) for segment in segments),
        num_ops_after=len([one for one in after if one.id() not in inside]),
        unknown_sizes=any(
            pir.has_unknown_size(value) for one in graph.forward for value in pir.results_of(one)
        ),
    )


def _info(segment: Segment, graph: Graph, has_backward: bool) -> SegmentInfo:
    crossing = crossing_values(segment, graph)
    info = SegmentInfo(
        name=segment.name,
        num_ops=len(segment.operations),
        crossing=len(crossing),
        crossing_bytes=sum(map(pir.num_bytes, crossing)),
        kept_ops={
            one.name(): why for one in segment.operations if (why := why_kept(one)) is not None
        },
    )
    if not has_backward:
        return info
    kept = [
        value
        for one in segment.operations
        for value in pir.results_of(one)
        if _is_kept(value, graph)
    ]
    copies = [one for one in graph.backward if pir.text_attribute(one, COPY_OF) == segment.name]
    return dataclasses.replace(
        info, num_recomputed=len(copies), kept_bytes=sum(map(pir.num_bytes, kept))
    )


def _is_kept(value: Value, graph: Graph) -> bool:
    return not graph.is_given(value) and bool(graph.backward_readers(value))


def _last_forward(program: paddle.static.Program) -> Operation | None:
    operations = pir.operations(program)
    for before, operation in itertools.pairwise(operations):
        if operation.has_attr(FIRST_BACKWARD):
            return before
    return None
