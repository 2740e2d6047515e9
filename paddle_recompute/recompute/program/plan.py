"""Which operators of a segment the pass copies, and where it inserts the copies."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_recompute.recompute.program.graph import Graph
from paddle_recompute.recompute.program.segments import Kept, Segment


@dataclass(frozen=True)
class Plan:
    """The second run of one segment.

    Attributes:
        segment: The name of the segment.
        needed: Variables that the backward needs and that are not kept.
        at: Position of the first backward operator that needs one of them; the copies go before it.
        copied: Positions of the operators that compute `needed` from kept variables, in order.
    """

    segment: str
    needed: tuple[str, ...]
    at: int
    copied: tuple[int, ...]

    def readers(self, name: str, graph: Graph) -> list[int]:
        """Positions of the backward operators that read the copy of `name` instead of `name`.

        All of them do, also those that read the shape only: any use of the original would make the
        executor keep it.
        """
        return [position for position in graph.backward_readers(name) if position >= self.at]


def plan(segment: Segment, graph: Graph, kept: Kept) -> Plan | None:
    """The second run of `segment`; None if its backward needs only what is kept."""
    needed = [
        name
        for position in segment.positions
        for name in graph.outputs(position)
        if graph.value_readers(name) and name not in kept
    ]
    if not needed:
        return None
    at = min(graph.value_readers(name)[0] for name in needed)
    copied: set[int] = set()
    waiting = list(needed)
    while waiting:
        definer = graph.definer(waiting.pop())
        assert definer is not None  # a variable without an operator is kept
        if definer not in copied:
            copied.add(definer)
            waiting += [name for name in graph.inputs(definer) if name not in kept]
    return Plan(segment.name, tuple(needed), at, tuple(sorted(copied)))
