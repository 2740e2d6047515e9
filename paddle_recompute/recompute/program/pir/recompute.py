"""The copies of operators in PIR: new Values, which the backward takes instead."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.marks import COPY_OF
from paddle_recompute._paddle.static.pir import Value
from paddle_recompute.recompute.program.pir.graph import FIRST_BACKWARD, Graph
from paddle_recompute.recompute.program.pir.operators import running_statistics
from paddle_recompute.recompute.program.plan import Plan
from paddle_recompute.recompute.program.segments import Kept


def carry_out(plans: Sequence[Plan], graph: Graph, kept: Kept) -> None:
    """Insert the copies of `plans`, and let the backward take them.

    Also costs one copy of each value that a segment takes from outside.
    """
    for position in graph.backward[:1]:
        graph.write_text(position, FIRST_BACKWARD, "yes")
    with pir.editing(graph.program):
        for plan in plans:
            pir.insert_before(graph.operators[plan.at])
            copies = _Copies(graph, kept, plan)
            for position in plan.copied:
                copies.add(position)
            for name in plan.needed:
                users = [graph.operators[position] for position in plan.readers(name, graph)]
                pir.replace_uses(graph.value(name), copies.of(name), users)


def _entering_gradient(at: int, graph: Graph) -> Value | None:
    """A gradient that exists when the backward reaches `at`; None at its start."""
    earlier = [position for position in graph.backward if position < at]
    made = {name for position in earlier for name in graph.outputs(position)}
    taken = [name for name in graph.inputs(at) if name in made]
    last_first = (name for position in reversed(earlier) for name in graph.outputs(position))
    for name in (*taken, *last_first):
        if pir.can_wait(graph.value(name)):
            return graph.value(name)
    return None


class _Copies:
    """The copies of one segment's operators, at the insertion point."""

    def __init__(self, graph: Graph, kept: Kept, plan: Plan) -> None:
        self._graph = graph
        self._kept = kept
        self._segment = plan.segment
        gradient = _entering_gradient(plan.at, graph)
        self._zero = None if gradient is None else pir.zero_after(gradient)
        self._copy: dict[str, Value] = {}
        self._waiting: set[str] = set()  # originals whose copy needs a held-back operand

    def of(self, name: str) -> Value:
        """The copy of `name`."""
        return self._copy[name]

    def add(self, position: int) -> None:
        """Copy the operator at `position`, whose operands are kept or copied already."""
        operation, operands = self._graph.operators[position], self._graph.inputs(position)
        for name in operands:
            if name in self._kept and not self._graph.is_given(name):
                self._hold_back(name)
            elif self._graph.shares_memory(name):
                self._copy_once(name)
        if self._waiting.isdisjoint(operands):
            for name in operands:  # for example the cast of a weight, under mixed precision
                self._hold_back(name)
        statistics = {
            pir.key(one): pir.copy_after(one, self._zero) for one in running_statistics(operation)
        }
        if self._graph.mask(position) is not None:
            again = [pir.dropout_again(operation, self._copy)]
        else:
            again = pir.results_of(pir.clone(operation, {**self._copy, **statistics}))
        pir.write_text(again[0].get_defining_op(), COPY_OF, self._segment)
        waits = not self._waiting.isdisjoint(operands)
        for name, copy in zip(self._graph.outputs(position), again, strict=False):
            self._copy[name] = copy
            if waits:
                self._waiting.add(name)

    def _hold_back(self, name: str) -> None:
        value = self._graph.value(name)
        if self._graph.shares_memory(name):
            self._copy_once(name)
        elif self._zero is not None and name not in self._waiting and pir.can_wait(value):
            self._copy[name] = pir.after(self._copy.get(name, value), self._zero)
            self._waiting.add(name)

    def _copy_once(self, name: str) -> None:
        """Use a copy of `name`, because the executor may overwrite what is made of it."""
        value = self._graph.value(name)
        if name not in self._copy:
            self._copy[name] = pir.copy_after(value, self._zero)
            if self._zero is not None and pir.can_wait(value):
                self._waiting.add(name)
