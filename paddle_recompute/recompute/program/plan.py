"""What the pass copies of a segment, and where to."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_recompute.recompute.program.graph import Graph
from paddle_recompute.recompute.program.segments import Kept, Segment


@dataclass(frozen=True)
class Plan:
    """The second run of one segment.

    Attributes:
        segment: The name of the segment.
        needed: Variables that the backward needs and nobody keeps.
        at: Position of the first backward operator that needs one of them; the copies go before it.
        copied: Positions of the operators that compute what is needed from what is kept, in order.
    """

    segment: str
    needed: tuple[str, ...]
    at: int
    copied: tuple[int, ...]

    def readers(self, name: str, graph: Graph) -> list[int]:
        """Positions of the backward operators that change over from `name` to its copy.

        All do, those too that want the shape only: a use of the original by any of them is one
        more reason for the executor to keep it.
        """
        return [position for position in graph.backward_readers(name) if position >= self.at]


def plan(segment: Segment, graph: Graph, kept: Kept) -> Plan | None:
    """How to compute `segment` again; None if its backward needs nothing that is not kept."""
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
        assert definer is not None  # what no operator computes is kept
        if definer not in copied:
            copied.add(definer)
            waiting += [name for name in graph.inputs(definer) if name not in kept]
    return Plan(segment.name, tuple(needed), at, tuple(sorted(copied)))
