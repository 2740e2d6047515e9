"""`explain` for Programs of the old representation."""

from __future__ import annotations

import paddle

from paddle_recompute._paddle.static import old_ir
from paddle_recompute.recompute.program.old_ir.graph import Graph
from paddle_recompute.recompute.program.old_ir.operators import why_kept
from paddle_recompute.recompute.program.old_ir.segments import (
    Segment,
    crossing_names,
    find_segments,
)
from paddle_recompute.recompute.program.report import SegmentInfo, SegmentReport


def explain(program: paddle.static.Program) -> SegmentReport:
    """As `static_graph.explain`."""
    graph = Graph(program)
    chosen = _recomputed(graph) if graph.backward else []
    segments = chosen or find_segments(graph)
    last = max(position for segment in segments for position in segment.positions)
    return SegmentReport(
        segments=tuple(_info(segment, graph, is_trained=bool(chosen)) for segment in segments),
        num_ops_after=sum(position > last for position in graph.forward),
        unknown_sizes=any(
            old_ir.has_unknown_size(graph.block, name)
            for position in graph.forward
            for name in graph.outputs(position)
        ),
    )


def _recomputed(graph: Graph) -> list[Segment]:
    """The segments that `minimize` has made."""
    names = {variable: name for name, variable in old_ir.checkpoints(graph.program).items()}
    grouped: dict[str, list[int]] = {}
    for position in graph.forward:
        name = old_ir.text_attribute(graph.operators[position], old_ir.SEGMENT)
        if name is not None:
            grouped.setdefault(name, []).append(position)
    return [
        Segment(
            name,
            tuple(positions),
            frozenset(one for p in positions for one in graph.outputs(p) if one in names),
        )
        for name, positions in grouped.items()
    ]


def _info(segment: Segment, graph: Graph, *, is_trained: bool) -> SegmentInfo:
    crossing = crossing_names(segment, graph)
    return SegmentInfo(
        name=segment.name,
        num_ops=len(segment.positions),
        num_recomputed=_num_copies(segment, graph) if is_trained else None,
        kept_bytes=_kept_bytes(segment, graph) if is_trained else None,
        crossing=len(crossing),
        crossing_bytes=sum(old_ir.num_bytes(graph.block, name) for name in crossing),
        kept_ops={
            graph.operators[position].type: why
            for position in segment.positions
            if (why := why_kept(graph.operators[position])) is not None
        },
    )


def _num_copies(segment: Segment, graph: Graph) -> int:
    copies = [old_ir.text_attribute(graph.operators[p], old_ir.COPY_OF) for p in graph.backward]
    return copies.count(segment.name)


def _kept_bytes(segment: Segment, graph: Graph) -> int:
    kept = {
        name
        for position in segment.positions
        if not graph.is_constant(position)
        for name in graph.outputs(position)
        if name not in old_ir.shape_only_outputs(graph.operators[position])
        and not old_ir.is_persistable(graph.block, name)
        and any(
            old_ir.reads_values_of(graph.operators[reader], name)
            for reader in graph.backward_readers(name)
        )
    }
    return sum(old_ir.num_bytes(graph.block, name) for name in kept)
