"""Which forward operators form the segments that are recomputed, and what each one keeps.

There are two kinds. A segment of a checkpoint (`mark_checkpoint`) is everything since the
checkpoint before it, or since the start. A segment of a call (a wrapped Layer that was called
while the Program was built) is what that call added. Of a segment are kept: its checkpoint, what
later forward operators take from it, and what cannot be computed twice (`operators.why_kept`).
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation, Value
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute.program.pir.aliasing import Memory
from paddle_recompute.recompute.program.pir.graph import Graph
from paddle_recompute.recompute.program.pir.operators import is_replayed_from_mask, why_kept
from paddle_recompute.recompute.program.report import mebibytes

SEGMENT = "recompute_segment"
"""Attribute of a forward operator: the segment that it was recomputed in."""

SMALL = 8
"""A side result of this fraction of a kept result, as a norm's mean, is not worth a second run."""

_AND = " and "  # between the names of checkpoints that one operator returns
_logger = logging.getLogger("paddle_recompute")


@dataclass
class Segment:
    """Forward operators that are recomputed together.

    Attributes:
        name: The checkpoint at its end, or the call that it is.
        operations: Its operators, in order.
        ends: Keys of the variables that are its checkpoint; a call has none, what later
            operators take from it is kept anyway.
        gives_up_outputs: Whether even what later operators take from it is computed again.
    """

    name: str
    operations: list[Operation]
    ends: frozenset[str] = frozenset()
    gives_up_outputs: bool = False
    members: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        """Know the operators by id."""
        self.members = frozenset(operation.id() for operation in self.operations)


def find_segments(graph: Graph, names: Collection[str] = ()) -> list[Segment]:
    """The segments of `graph` that `names` select, in its order.

    Args:
        graph: The Program.
        names: Checkpoints and calls; all that the Program has, if it is empty. The calls of one
            Layer are all selected by its name; the second is "name#2" by itself.

    Raises:
        StaticGraphError: A name is not in the Program, or there is none at all.
    """
    checkpoints = pir.checkpoints(graph.program)
    calls = _calls(graph)
    known = [*checkpoints, *calls]
    if not known:
        raise StaticGraphError(
            "recompute is on, but this Program has no checkpoints: name variables with "
            "static_graph.mark_checkpoint(variable, name) while building it, or wrap Layers with "
            "apply_recompute before they are called"
        )
    chosen = {name for name in known if not names or name in names or _layer(name) in names}
    for name in names:
        if name not in chosen and name not in {_layer(one) for one in chosen}:
            raise StaticGraphError(_unknown(name, known))
    segments = [segment for name, segment in calls.items() if name in chosen]
    taken = {member for segment in segments for member in segment.members}
    segments += _between({n: v for n, v in checkpoints.items() if n in chosen}, graph, taken)
    return sorted(segments, key=lambda segment: graph.position(segment.operations[0]))


def warn_of_marks_inside(
    segments: Iterable[Segment], graph: Graph, names: Collection[str] = ()
) -> None:
    """Warn of selected checkpoints inside a call, which is recomputed whole all the same."""
    calls = [segment for segment in segments if not segment.ends]
    for name, value in pir.checkpoints(graph.program).items():
        definer = graph.definer(value)
        assert definer is not None  # it was found on its operator
        for call in calls:
            if definer.id() in call.members and (not names or name in names):
                _logger.warning(
                    "checkpoint '%s' has no effect: it is inside '%s', a Layer that is recomputed "
                    "whole; mark it outside, or wrap the parts of that Layer instead",
                    name,
                    call.name,
                )


def warn_of_crossings(segments: Iterable[Segment], graph: Graph) -> None:
    """Warn, in words, of checkpoints that leave more than themselves behind.

    A variable that is made before a checkpoint and used after it, other than the checkpoint, is
    kept too. When they are larger than the checkpoint, it does not cut the graph.
    """
    for segment in segments:
        if not segment.ends:
            continue
        crossing = [v for v in crossing_values(segment, graph) if pir.key(v) not in segment.ends]
        size = sum(map(pir.num_bytes, crossing))
        own = sum(
            pir.num_bytes(value)
            for operation in segment.operations
            for value in pir.results_of(operation)
            if pir.key(value) in segment.ends
        )
        if size > own:
            _logger.warning(
                "checkpoint '%s' does not cut the graph: %s, %s, besides the checkpoint of %s: %s. "
                "All of them are kept; mark a variable that everything after it depends on alone",
                segment.name,
                f"{len(crossing)} variables cross this segment's end",
                mebibytes(size),
                mebibytes(own),
                ", ".join(_described(value) for value in _largest(crossing)),
            )


def crossing_values(segment: Segment, graph: Graph) -> list[Value]:
    """The variables that forward operators outside of `segment` take from it."""
    return [
        value
        for operation in segment.operations
        if not graph.is_constant(operation)
        for value in pir.results_of(operation)
        if _escapes(value, segment, graph) or pir.key(value) in segment.ends
    ]


class Kept:
    """Which variables stay from the forward to the backward; the others are computed again."""

    def __init__(self, segments: Iterable[Segment], graph: Graph) -> None:
        self._graph = graph
        self._segment_of = {member: segment for segment in segments for member in segment.members}
        self._memory = Memory(graph.forward)
        self._known: dict[str, str | None] = {}

    def __contains__(self, value: Value) -> bool:
        return self.reason(value) is not None

    def reason(self, value: Value) -> str | None:
        """Why `value` is kept, in words; None if it is computed again."""
        key = pir.key(value)
        if key not in self._known:
            self._known[key] = self._reason(value, key)
        return self._known[key]

    def _reason(self, value: Value, key: str) -> str | None:
        operation = self._graph.definer(value)
        segment = self._segment_of.get(operation.id()) if operation is not None else None
        if operation is None or segment is None:
            return "it is not part of a segment"
        if key in segment.ends:
            return "it is the checkpoint"
        why = why_kept(operation)
        if why is not None:
            return why
        if self._graph.is_constant(operation):
            return "it is a constant"
        if is_replayed_from_mask(operation) and key != pir.key(operation.result(0)):
            return "it is the mask of a dropout"
        if pir.is_used_in_a_body(value):
            return "a branch or loop uses it"
        if not segment.gives_up_outputs and _escapes(value, segment, self._graph):
            return "operators after the segment use it"
        largest = max(pir.results_of(operation), key=pir.num_bytes)
        if 0 < SMALL * pir.num_bytes(value) <= pir.num_bytes(largest) and largest in self:
            return "it is small, and what its operator returns besides it is kept"
        if self._memory.is_shared(value):
            return "another variable may share its memory"
        # An operator that was run before the overwriting would now see other numbers.
        if any(self._memory.is_overwritten(operand) for operand in pir.operands_of(operation)):
            return "it was computed from a variable that is changed in place"
        return None


def applied_segments(graph: Graph) -> list[Segment]:
    """The segments that a pass has applied to `graph` before, in its order; maybe none."""
    checkpoints = pir.checkpoints(graph.program)
    grouped: dict[str, list[Operation]] = {}
    for operation in graph.forward:
        name = pir.text_attribute(operation, SEGMENT)
        if name is not None:
            grouped.setdefault(name, []).append(operation)
    return [
        Segment(
            name,
            operations,
            frozenset(
                pir.key(checkpoints[n]) for n in (name, *name.split(_AND)) if n in checkpoints
            ),
            gives_up_outputs=operations[0].has_attr("recompute_gives_up"),
        )
        for name, operations in grouped.items()
    ]


def _escapes(value: Value, segment: Segment, graph: Graph) -> bool:
    return any(user.id() not in segment.members for user in graph.forward_users(value))


def _calls(graph: Graph) -> dict[str, Segment]:
    grouped: dict[str, list[Operation]] = {}
    for operation in graph.forward:
        name = pir.text_attribute(operation, "recompute_scope")
        if name is not None:
            grouped.setdefault(name, []).append(operation)
    return {
        name: Segment(
            name, operations, gives_up_outputs=operations[0].has_attr("recompute_gives_up")
        )
        for name, operations in grouped.items()
    }


def _between(checkpoints: dict[str, Value], graph: Graph, taken: set[int]) -> list[Segment]:
    """The segments that end at `checkpoints`, without operators that are `taken` already."""
    by_position: dict[int, list[str]] = {}
    for name, value in checkpoints.items():
        definer = graph.definer(value)
        assert definer is not None  # it was found on its operator
        by_position.setdefault(graph.position(definer), []).append(name)
    segments = []
    start = 0
    for end, names in sorted(by_position.items()):
        operations = [
            one
            for one in graph.forward[start : end + 1]
            if one.id() not in taken and one.name() not in pir.SOURCES
        ]
        ends = frozenset(pir.key(checkpoints[name]) for name in names)
        if operations:
            segments.append(Segment(_AND.join(names), operations, ends))
        start = end + 1
    return segments


def _layer(name: str) -> str:
    """The Layer of a call: ``encoder.layers.0`` for its second call ``encoder.layers.0#2``."""
    return name.partition("#")[0]


def _largest(values: list[Value]) -> list[Value]:
    return sorted(values, key=pir.num_bytes, reverse=True)[:3]


def _described(value: Value) -> str:
    operation = pir.defining_operation(value)
    assert operation is not None  # a variable of a segment is the result of an operator
    place = pir.text_attribute(operation, "struct_name")
    shape = "x".join(map(str, value.shape))
    return f"{operation.name().rpartition('.')[2]}[{shape}]{f' in {place}' if place else ''}"


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
    listed = ", ".join(f"'{one}'" for one in near)
    return (
        f"the checkpoint '{name}' is not in this Program; it has {len(known)}, among them "
        f"{listed}. Checkpoints are named by static_graph.mark_checkpoint, or by the Layers that "
        "apply_recompute wrapped"
    )
