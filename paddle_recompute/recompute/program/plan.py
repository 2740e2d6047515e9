"""Which operators of a segment the pass copies, and where it inserts the copies."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from paddle_recompute.recompute.program.graph import Graph
from paddle_recompute.recompute.program.segments import KeptVariables, ProgramSegment


@dataclass(frozen=True)
class Plan:
    """The second run of one segment.

    Attributes:
        segment: The name of the segment.
        needed: Variables that the backward needs and that are not kept.
        at: Position of the first backward operator that needs one of them; the copies go before it.
        copied: Positions of the operators that compute `needed` from kept variables, in order.
        gradients: Gradients that exist when the backward reaches `at`; none at its start.
        held_back: For each of `copied`, the variables that must not reach its copy before
            `gradients` exist: then no copy can start before. None if there are no `gradients`.
    """

    segment: str
    needed: tuple[str, ...]
    at: int
    copied: tuple[int, ...]
    gradients: tuple[str, ...]
    held_back: tuple[tuple[str, ...], ...]

    def readers(self, name: str, graph: Graph) -> list[int]:
        """Positions of the backward operators that read the copy of `name` instead of `name`.

        All of them do, also those that read the shape only: any use of the original would make the
        executor keep it.
        """
        return [position for position in graph.backward_readers(name) if position >= self.at]


def plan(segment: ProgramSegment, graph: Graph, kept: KeptVariables) -> Plan | None:
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
    in_order = tuple(sorted(copied))
    gradients = _entering_gradients(at, graph)
    held_back = _held_back(in_order, graph, kept) if gradients else ((),) * len(in_order)
    return Plan(segment.name, tuple(needed), at, in_order, gradients, held_back)


def _entering_gradients(at: int, graph: Graph) -> tuple[str, ...]:
    earlier = [position for position in graph.backward if position < at]
    last_first = [name for position in reversed(earlier) for name in graph.outputs(position)]
    made = frozenset(last_first)
    entering = [name for name in graph.inputs(at) if name in made and graph.can_wait(name)]
    return tuple(entering or itertools.islice(filter(graph.can_wait, last_first), 1))


def _held_back(
    copied: tuple[int, ...], graph: Graph, kept: KeptVariables
) -> tuple[tuple[str, ...], ...]:
    """What the copies read that exists earlier, but is not a parameter or a constant; those only
    where an operator reads nothing else, as the cast of a weight does under mixed precision.
    """
    waiting: set[str] = set()
    found = []
    for position in copied:
        inputs = list(filter(graph.can_wait, dict.fromkeys(graph.inputs(position))))
        held = [name for name in inputs if name in kept and not graph.is_given(name)]
        if waiting.isdisjoint(graph.inputs(position)):
            held = held or inputs
        held = [name for name in held if name not in waiting]
        waiting.update(held)
        found.append(tuple(held))
        if not graph.inputs(position) or not waiting.isdisjoint(graph.inputs(position)):
            waiting.update(graph.outputs(position))
    return tuple(found)
