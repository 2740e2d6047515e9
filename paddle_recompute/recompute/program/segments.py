"""Which forward operators form the segments that are recomputed, and what each one keeps.

There are two kinds. The segment of a checkpoint (`mark_checkpoint`) is everything after the
checkpoint before it, or after the start. The segment of a call (of a Layer that is wrapped while
the Program is built) is the operators of that call. A segment keeps its checkpoint, the variables
that later forward operators read, and what cannot be computed twice (`Graph.why_kept`).
"""

from __future__ import annotations

import difflib
import functools
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute._paddle.static.attributes import DISCARD_OUTPUTS, SEGMENT
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute.program.graph import Graph

_AND = " and "  # between the names of checkpoints that one operator returns
_logger = logging.getLogger("paddle_recompute")


@dataclass(frozen=True)
class ProgramSegment:
    """Forward operators that are recomputed together.

    Attributes:
        name: The checkpoint at its end, or the name of the call.
        positions: Its operators, in order.
        ends: The variables of its checkpoint; a call has none, because what later operators read
            is kept anyway.
        discard_outputs: Whether what later operators read is recomputed too.
    """

    name: str
    positions: tuple[int, ...]
    ends: frozenset[str] = frozenset()
    discard_outputs: bool = False

    @functools.cached_property
    def members(self) -> frozenset[int]:
        """`positions` as a set."""
        return frozenset(self.positions)


def find_segments(graph: Graph, names: Collection[str] = ()) -> list[ProgramSegment]:
    """The segments of `graph` that `names` select, in Program order.

    Args:
        graph: The Program.
        names: Checkpoints, calls or, if they have names, intermediate variables; empty: all
            checkpoints and calls of the Program. The name of a Layer selects all its calls;
            "name#2" selects the second one.

    Raises:
        StaticGraphError: A name is not in the Program, or the Program has no checkpoint.
    """
    calls = graph.calls()
    known = [*graph.checkpoints, *calls]
    chosen = {name for name in known if not names or name in names or _layer(name) in names}
    selected = {*chosen, *map(_layer, chosen)}
    ends = {name: variable for name, variable in graph.checkpoints.items() if name in chosen}
    for name in names:
        variable = graph.variable(name)
        if name not in selected and variable is not None:
            ends[name] = variable
    if not known and not ends:
        raise StaticGraphError(
            "this Program has no checkpoints, so nothing in it is recomputed: name variables with "
            "static_graph.mark_checkpoint(variable, name) while building it, or wrap Layers with "
            "apply_recompute before they are called"
        )
    for name in names:
        if name not in selected and name not in ends:
            raise StaticGraphError(_unknown(name, known))
    segments = [
        ProgramSegment(
            name,
            tuple(positions),
            discard_outputs=any(graph.text(p, DISCARD_OUTPUTS) is not None for p in positions),
        )
        for name, positions in calls.items()
        if name in chosen
    ]
    taken = {position for segment in segments for position in segment.positions}
    segments += _between(ends, graph, taken)
    return sorted(segments, key=lambda segment: segment.positions[0])


def applied_segments(graph: Graph) -> list[ProgramSegment]:
    """The segments that a pass has applied to `graph`, in Program order; may be empty."""
    checkpoints = graph.checkpoints
    return [
        ProgramSegment(
            name,
            tuple(positions),
            frozenset(checkpoints[n] for n in (name, *name.split(_AND)) if n in checkpoints),
        )
        for name, positions in graph.grouped(SEGMENT).items()
    ]


def warn_of_marks_inside(
    segments: Iterable[ProgramSegment], graph: Graph, names: Collection[str] = ()
) -> None:
    """Warn of selected checkpoints inside a recomputed call, where they have no effect."""
    calls = [segment for segment in segments if not segment.ends]
    for name, variable in graph.checkpoints.items():
        for call in calls:
            if graph.definer(variable) in call.members and (not names or name in names):
                _logger.warning(
                    "checkpoint '%s' has no effect: it is inside '%s', a Layer that is recomputed "
                    "as a whole; mark it outside, or wrap the parts of that Layer instead",
                    name,
                    call.name,
                )


def warn_of_crossings(segments: Iterable[ProgramSegment], graph: Graph) -> None:
    """Warn of checkpoints that do not cut the graph.

    A variable from before a checkpoint that later operators read is kept besides the checkpoint.
    The warning is given if such variables are larger than the checkpoint.
    """
    for segment in segments:
        crossing = [
            variable
            for variable in crossing_variables(segment, graph)
            if variable not in segment.ends
        ]
        size, own = (sum(map(graph.num_bytes, names)) for names in (crossing, segment.ends))
        if segment.ends and size > own:
            largest = sorted(crossing, key=graph.num_bytes, reverse=True)[:3]
            _logger.warning(
                "checkpoint '%s' does not cut the graph: %d variables cross this segment's end, "
                "%s, besides the checkpoint of %s: %s. All of them are kept; mark a variable that "
                "alone determines everything after it",
                segment.name,
                len(crossing),
                format_bytes(size),
                format_bytes(own),
                ", ".join(map(graph.described, largest)),
            )


def crossing_variables(segment: ProgramSegment, graph: Graph) -> list[str]:
    """The variables of `segment` that forward operators outside of it read."""
    found = {
        name: None
        for position in segment.positions
        if not graph.is_constant(position)
        for name in graph.outputs(position)
        if name in segment.ends or _escapes(name, segment, graph)
    }
    return list(found)


class KeptVariables:
    """The variables that are kept from the forward to the backward; others are recomputed."""

    def __init__(self, segments: Iterable[ProgramSegment], graph: Graph) -> None:
        self._graph = graph
        self._segment_at = {
            position: segment for segment in segments for position in segment.positions
        }
        self._known: dict[str, str | None] = {}

    def __contains__(self, name: object) -> bool:
        return self.reason(str(name)) is not None

    def reason(self, name: str) -> str | None:
        """Why the variable is kept, in words; None if it is recomputed."""
        if name not in self._known:
            self._known[name] = self._reason(name)
        return self._known[name]

    def _reason(self, name: str) -> str | None:
        graph = self._graph
        position = graph.definer(name)
        segment = None if position is None else self._segment_at.get(position)
        if position is None or segment is None:
            return "it is not part of a segment"
        if name in segment.ends:
            return "it is the checkpoint"
        why = graph.why_kept(position)
        if why is not None:
            return why
        if graph.is_constant(position):
            return "it is a constant"
        if name == graph.mask(position):
            return "it is the mask of a dropout"
        if graph.is_used_in_a_body(name):
            return "a branch or loop uses it"
        if not segment.discard_outputs and _escapes(name, segment, graph):
            return "operators after the segment use it"
        return graph.why_output_kept(name, position, self)


def _escapes(name: str, segment: ProgramSegment, graph: Graph) -> bool:
    return any(reader not in segment.members for reader in graph.forward_readers(name))


def _between(checkpoints: dict[str, str], graph: Graph, taken: set[int]) -> list[ProgramSegment]:
    """The segments that end at `checkpoints`, without operators that are `taken` already."""
    by_position: dict[int, list[str]] = {}
    for name, variable in checkpoints.items():
        definer = graph.definer(variable)
        if definer is None:
            raise StaticGraphError(
                f"checkpoint '{name}' is not part of the forward of this loss: mark a variable "
                "from which the loss is computed"
            )
        by_position.setdefault(definer, []).append(name)
    segments = []
    start = 0
    for end, names in sorted(by_position.items()):
        positions = tuple(p for p in graph.forward if start <= p <= end and p not in taken)
        if positions:
            ends = frozenset(checkpoints[name] for name in names)
            segments.append(ProgramSegment(_AND.join(names), positions, ends))
        start = end + 1
    return segments


def _layer(name: str) -> str:
    """The Layer of a call: ``encoder.layers.0`` for its second call ``encoder.layers.0#2``."""
    return name.partition("#")[0]


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
    listed = f", among them {', '.join(map(repr, near))}" if near else ""
    return (
        f"the checkpoint '{name}' is not in this Program; it has {len(known)}{listed}. "
        "Checkpoints are named by static_graph.mark_checkpoint, or by the Layers that "
        "apply_recompute wrapped"
    )
