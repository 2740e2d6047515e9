"""Which forward operators form the segments that are recomputed, and what each one keeps.

As on PIR there are two kinds. A segment of a checkpoint (`mark_checkpoint`) is everything since the
checkpoint before it, or since the start. A segment of a call (a wrapped Layer that was called
while the Program was built) is what that call added. Of a segment are kept: its checkpoint, what
later forward operators take from it, and what cannot be computed twice (`operators.why_kept`).
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paddle_recompute._paddle.static import old_ir
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute.program.old_ir.graph import Graph
from paddle_recompute.recompute.program.old_ir.operators import is_replayed_from_mask, why_kept
from paddle_recompute.recompute.program.report import mebibytes

_logger = logging.getLogger("paddle_recompute")


@dataclass(frozen=True)
class Segment:
    """Forward operators that are recomputed together.

    Attributes:
        name: The checkpoint at its end, or the call that it is.
        positions: Its operators in the Program before the pass, in order.
        ends: Names of the variables that are its checkpoint; a call has none, what later
            operators take from it is kept anyway.
        gives_up_outputs: Whether even what later operators take from it is computed again.
    """

    name: str
    positions: tuple[int, ...]
    ends: frozenset[str] = frozenset()
    gives_up_outputs: bool = False


def find_segments(graph: Graph, names: Collection[str] = ()) -> list[Segment]:
    """The segments of `graph` that `names` select, in its order.

    Args:
        graph: The Program.
        names: Checkpoints, calls, or, as in Paddle's own ``recompute_configs``, names of
            intermediate variables; all checkpoints and calls of the Program, if it is empty. The
            calls of one Layer are all selected by its name; the second is "name#2" by itself.

    Raises:
        StaticGraphError: A name is not in the Program, there is none at all, or two of them leave
            no operator between them.
    """
    checkpoints = old_ir.checkpoints(graph.program)
    calls = _calls(graph)
    known = [*checkpoints, *calls]
    variables = [name for name in names if name not in known and graph.writer(name) is not None]
    if not known and not variables:
        raise StaticGraphError(
            _unknown(next(iter(names)), known)
            if names
            else "recompute is on, but this Program has no checkpoints: name variables with "
            "static_graph.mark_checkpoint(variable, name) while building it, or wrap Layers with "
            "apply_recompute before they are called"
        )
    chosen = {name for name in known if not names or name in names or _layer(name) in names}
    for name in names:
        if name not in variables and name not in {*chosen, *map(_layer, chosen)}:
            raise StaticGraphError(_unknown(name, known))
    segments = [segment for name, segment in calls.items() if name in chosen]
    taken = {position for segment in segments for position in segment.positions}
    ends = {name: variable for name, variable in checkpoints.items() if name in chosen}
    segments += _between({**ends, **{name: name for name in variables}}, graph, taken)
    return sorted(segments, key=lambda segment: segment.positions[0])


def warn_of_crossings(segments: Iterable[Segment], graph: Graph) -> None:
    """Warn, in words, of checkpoints that leave more than themselves behind.

    A variable that is made before a checkpoint and used after it, other than the checkpoint, is
    kept too. When they are larger than the checkpoint, it does not cut the graph.
    """
    for segment in segments:
        crossing = [name for name in crossing_names(segment, graph) if name not in segment.ends]
        size, own = (
            sum(old_ir.num_bytes(graph.block, name) for name in names)
            for names in (crossing, segment.ends)
        )
        if segment.ends and size > own:
            _logger.warning(
                "checkpoint '%s' does not cut the graph: %d variables cross this segment's end, "
                "%s, besides the checkpoint of %s: %s. All of them are kept; mark a variable that "
                "everything after it depends on alone",
                segment.name,
                len(crossing),
                mebibytes(size),
                mebibytes(own),
                ", ".join(_described(name, graph) for name in _largest(crossing, graph)),
            )


def crossing_names(segment: Segment, graph: Graph) -> list[str]:
    """The variables that forward operators outside of `segment` take from it."""
    members = frozenset(segment.positions)
    found = {
        name: None
        for position in segment.positions
        if not graph.is_constant(position)
        for name in graph.outputs(position)
        if name in segment.ends
        or any(reader not in members for reader in graph.forward_readers(name))
    }
    return list(found)


class Kept:
    """Which variables stay from the forward to the backward; the others are computed again."""

    def __init__(self, segments: Iterable[Segment], graph: Graph) -> None:
        self._graph = graph
        self._segment_at: dict[int, Segment] = {}
        self._crossing: set[str] = set()
        for segment in segments:
            self._segment_at |= dict.fromkeys(segment.positions, segment)
            if not segment.gives_up_outputs:
                self._crossing.update(crossing_names(segment, graph))
        self._known: dict[str, str | None] = {}

    def __contains__(self, name: str) -> bool:
        return self.reason(name) is not None

    def reason(self, name: str) -> str | None:
        """Why the variable is kept, in words; None if it is computed again."""
        if name not in self._known:
            self._known[name] = self._reason(name)
        return self._known[name]

    def is_given(self, name: str) -> bool:
        """Whether the variable is a parameter or a constant, which is there all the time anyway."""
        writer = self._graph.writer(name)
        if writer is None:
            return old_ir.is_persistable(self._graph.block, name)
        return self._graph.is_constant(writer)

    def _reason(self, name: str) -> str | None:
        graph = self._graph
        writer = graph.writer(name)
        segment = None if writer is None else self._segment_at.get(writer)
        if writer is None or segment is None:
            return "it is not part of a segment"
        operator = graph.operators[writer]
        reasons = {
            "it is the checkpoint": name in segment.ends,
            why_kept(operator): True,
            "it is a constant": graph.is_constant(writer),
            "it has a shape and no memory": name in old_ir.shape_only_outputs(operator),
            "it is the mask of a dropout": is_replayed_from_mask(operator)
            and name not in operator.output("Out"),
            "a branch or loop uses it": graph.is_used_in_a_body(name),
            "operators after the segment use it": name in self._crossing,
            "it is changed in place": graph.is_changed_in_place(name),
            # A copy of the operator would now see other numbers.
            "it was computed from a variable that is changed in place": any(
                graph.is_changed_in_place(one) for one in graph.inputs(writer)
            ),
        }
        return next((why for why, holds in reasons.items() if why is not None and holds), None)


def _calls(graph: Graph) -> dict[str, Segment]:
    grouped: dict[str, list[int]] = {}
    scope: str | None = None
    for position in reversed(graph.forward):
        operator = graph.operators[position]
        own = old_ir.text_attribute(operator, old_ir.SCOPE)
        # Automatic mixed precision puts casts before the operator that they are for.
        scope = own if own is not None or operator.type != "cast" else scope
        if scope is not None:
            grouped.setdefault(scope, []).append(position)
    return {
        name: Segment(
            name,
            tuple(reversed(positions)),
            gives_up_outputs=graph.operators[positions[0]].has_attr(old_ir.GIVES_UP),
        )
        for name, positions in reversed(grouped.items())
    }


def _between(checkpoints: dict[str, str], graph: Graph, taken: set[int]) -> list[Segment]:
    """The segments that end at `checkpoints`, without operators that are `taken` already."""
    by_position: dict[int, list[str]] = {}
    for name, variable in checkpoints.items():
        writer = graph.writer(variable)
        if writer is None:
            raise StaticGraphError(
                f"checkpoint '{name}' is not part of the forward of this loss: mark a variable "
                "that the loss is computed from"
            )
        by_position.setdefault(writer, []).append(name)
    segments = []
    start = 0
    for end, names in sorted(by_position.items()):
        positions = tuple(p for p in graph.forward if start <= p <= end and p not in taken)
        ends = frozenset(checkpoints[name] for name in names)
        if positions:
            segments.append(Segment(" and ".join(names), positions, ends))
        start = end + 1
    return segments


def _layer(name: str) -> str:
    """The Layer of a call: ``encoder.layers.0`` for its second call ``encoder.layers.0#2``."""
    return name.partition("#")[0]


def _largest(names: list[str], graph: Graph) -> list[str]:
    return sorted(names, key=lambda name: old_ir.num_bytes(graph.block, name), reverse=True)[:3]


def _described(name: str, graph: Graph) -> str:
    return f"{name}[{'x'.join(map(str, old_ir.shape_of(graph.block, name)))}]"


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
    listed = f", among them {', '.join(map(repr, near))}" if near else ""
    return (
        f"the checkpoint '{name}' is not in this Program; it has {len(known)}{listed}. "
        "Checkpoints are named by static_graph.mark_checkpoint, or by the Layers that "
        "apply_recompute wrapped"
    )
