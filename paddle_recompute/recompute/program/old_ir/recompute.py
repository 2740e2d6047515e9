"""The pass: segments are computed again, in the backward, when their gradient has arrived.

After ``append_backward`` every backward operator reads the forward's own variables, so all of
them are kept. The pass copies the operators of a segment in front of the first backward operator
that needs one of them, and lets the backward read the copies: the executor then frees the
originals after their last forward use.

Paddle 2.6 has a pass for this (``DistributedStrategy.recompute``, ``RecomputeOptimizer``); ours
takes its place because that one

- draws the seed of every dropout from ``std::random_device``: a run cannot be repeated with
  ``paddle.seed``, nor compared with the run without recompute; here both have the same losses to
  the last bit, since a dropout is rebuilt from its mask;
- saves next to nothing under the multi-threaded executor (`old_ir.hold_back_before`);
- updates the running statistics of a BatchNorm twice, and refuses cond and while;
- drops a checkpoint without a word where the next one is not computed from it, as between the two
  towers of a dual encoder.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paddle_recompute._paddle.static import old_ir
from paddle_recompute.recompute.program.old_ir.graph import Graph
from paddle_recompute.recompute.program.old_ir.operators import is_replayed_from_mask
from paddle_recompute.recompute.program.old_ir.segments import Kept, Segment

_logger = logging.getLogger("paddle_recompute")


def recompute(graph: Graph, segments: Iterable[Segment]) -> None:
    """Make the backward of `graph` compute `segments` again; its Program is changed.

    Costs one more run of what is copied; a dropout costs less, it keeps one byte per element.
    """
    segments = list(segments)
    kept = Kept(segments, graph)
    plans = []
    for segment in segments:
        for position in segment.positions:
            old_ir.write_text(graph.operators[position], old_ir.SEGMENT, segment.name)
        plan = _Plan(graph, segment, kept)
        if plan.needed:
            plans.append(plan)
        else:
            _logger.warning(
                "segment '%s' has nothing to compute again: its backward needs none of its %d "
                "operators' results but those that are kept",
                segment.name,
                len(segment.positions),
            )
    # The last one first, so that the positions of those still to come stay true.
    for plan in sorted(plans, key=lambda plan: plan.at, reverse=True):
        plan.carry_out()
    old_ir.finish_changes(graph.program)


class _Plan:
    """What is to be copied of one segment, and where to.

    Attributes:
        needed: Variables that the backward needs and nobody keeps.
        at: Position of the first backward operator that needs one of them.
    """

    def __init__(self, graph: Graph, segment: Segment, kept: Kept) -> None:
        self._graph = graph
        self._segment = segment
        self._kept = kept
        self.needed = [
            name
            for position in segment.positions
            for name in graph.outputs(position)
            if name not in kept and self._value_readers(name)
        ]
        if self.needed:
            self.at = min(self._value_readers(name)[0] for name in self.needed)

    def _value_readers(self, name: str) -> list[int]:
        operators = self._graph.operators
        readers = self._graph.backward_readers(name)
        return [p for p in readers if old_ir.reads_values_of(operators[p], name)]

    def carry_out(self) -> None:
        """Insert the copies and let the backward read them."""
        graph, block = self._graph, self._graph.block
        copied = self._closure()
        renamed = {
            name: old_ir.new_variable_like(block, name, "RECOMPUTED")
            for position in copied
            for name in graph.outputs(position)
        }
        # All readers change over, those too that want the shape only: a use of the original by
        # any of them is one more reason for the executor to keep it.
        readers = {p for name in self.needed for p in graph.backward_readers(name) if p >= self.at}
        old_ir.rename_inputs(
            (graph.operators[p] for p in readers), {name: renamed[name] for name in self.needed}
        )
        at = self.at
        gradients = self._entering_gradients(copied)
        for name in self._to_hold_back(copied) if gradients else ():
            old_ir.hold_back_before(block, at, name, gradients)
            at += 1
        for position in copied:
            operator = graph.operators[position]
            again = is_replayed_from_mask(operator)
            copy = old_ir.dropout_again_before if again else old_ir.copy_before
            copy(block, at, operator, renamed, **{old_ir.COPY_OF: self._segment.name})
            at += 1

    def _closure(self) -> list[int]:
        """Positions of the operators that compute what is needed from what is kept."""
        graph = self._graph
        found: set[int] = set()
        waiting = list(self.needed)
        while waiting:
            position = graph.writer(waiting.pop())
            assert position is not None  # what no operator computes is kept
            if position not in found:
                found.add(position)
                waiting += [name for name in graph.inputs(position) if name not in self._kept]
        return sorted(found)

    def _to_hold_back(self, copied: list[int]) -> list[str]:
        """What the copies read that exists already, without which none of them can start."""
        graph, kept = self._graph, self._kept
        names: dict[str, None] = {}
        waits: set[str] = set()
        for position in copied:
            inputs = graph.inputs(position)
            given = [name for name in inputs if name in kept and kept.is_given(name)]
            names.update((name, None) for name in inputs if name in kept and name not in given)
            if not any(name in names or name in waits for name in inputs):
                # For example the cast of a weight, under mixed precision.
                names.update((name, None) for name in given)
            waits.update(graph.outputs(position))
        return list(names)

    def _entering_gradients(self, copied: list[int]) -> list[str]:
        """Gradients that exist when the backward reaches this segment; none at its very start."""
        graph = self._graph
        earlier = [p for p in graph.backward if p < self.at]
        made = {name for p in earlier for name in graph.outputs(p)}
        entering = [name for name in graph.inputs(self.at) if name in made]
        return entering or (graph.outputs(earlier[-1])[:1] if earlier else [])
