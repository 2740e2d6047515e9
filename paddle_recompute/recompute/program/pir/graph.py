"""A Program of PIR as a graph: its Values by number, and the memory that they share."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Container, Iterable, Sequence

import paddle

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation, Value
from paddle_recompute.recompute.program import graph
from paddle_recompute.recompute.program.pir.aliasing import Memory

FIRST_BACKWARD = "recompute_first_backward"
"""Attribute of the first backward operator, if the pass was applied."""

SMALL = 8
"""A side result of at most 1/8 of the main result's size, like a norm's mean, is kept with it."""


class PirGraph(graph.Graph):
    """See `graph.Graph`; backward and update of an earlier loss count as forward.

    Args:
        program: Any Program of PIR.
        before: Its operators before the backward was appended; None: the Program has no backward,
            or the pass was applied.
    """

    def __init__(
        self, program: paddle.static.Program, before: Sequence[Operation] | None = None
    ) -> None:
        self._values: dict[str, Value] = {}  # before the Program: they must die first
        operations = pir.operations(program)
        end = _end_of_forward(operations, before)
        computing = [p for p, op in enumerate(operations) if op.name() not in pir.SOURCES]
        super().__init__(
            pir,
            program,
            operations,
            [position for position in computing if position < end],
            [position for position in computing if position >= end],
        )
        for operation in operations:
            inner = itertools.islice(pir.with_bodies(operation), 1, None)
            results = self._named(pir.results_of(operation))
            self._add(
                self._named(pir.operands_of(operation)),
                results,
                self._named(value for op in inner for value in pir.operands_of(op)),
                results,
            )
        self._constants: set[int] = set()
        for position in self.forward:
            definers = map(self.definer, self.inputs(position))
            if self.why_kept(position) is None and self._constants.issuperset(definers):
                self._constants.add(position)

    def value(self, name: str) -> Value:
        return self._values[name]

    @functools.cached_property
    def memory(self) -> Memory:
        """The memory of the variables of the forward."""
        return Memory(self.operators[position] for position in self.forward)

    def shares_memory(self, name: str) -> bool:
        """Whether a write to `name` may change another variable; parameters are not written to."""
        value = self.value(name)
        operation = pir.defining_operation(value)
        if operation is None or operation.name() == "builtin.parameter" or not pir.is_dense(value):
            return False
        return self.memory.is_shared(value)

    def _why_output_kept(self, name: str, position: int, kept: Container[str]) -> str | None:
        largest = max(self.outputs(position), key=self.num_bytes)
        if 0 < SMALL * self.num_bytes(name) <= self.num_bytes(largest) and largest in kept:
            return "it is small, and the main result of its operator is kept"
        if self.memory.is_shared(self.value(name)):
            return "another variable may share its memory"
        is_part = self.kind(position) in ("builtin.split", "builtin.slice")
        if is_part and any(value in kept for value in self.inputs(position)):
            return "it is part of a list that is kept"
        return None

    def _is_changed_in_place(self, name: str) -> bool:
        return self.memory.is_overwritten(self.value(name))

    def can_wait(self, name: str) -> bool:
        return pir.can_wait(self.value(name))

    def is_constant(self, position: int) -> bool:
        """Whether it is a shape, scale or probability; those are small."""
        return position in self._constants

    def is_given(self, name: str) -> bool:
        operation = pir.defining_operation(self.value(name))
        if operation is None or operation.name() == "builtin.parameter":
            return True
        return self.definer(name) in self._constants

    def described(self, name: str) -> str:
        shape, position = pir.shape_of(self.value(name)), self.definer(name)
        assert position is not None  # only results of a segment are described
        place = self.text(position, "struct_name")
        # The stack that a cond or while keeps for its backward has no shape.
        size = "..." if shape is None else "x".join(map(str, shape))
        kind = self.kind(position).rpartition(".")[2]
        return f"{kind}[{size}]{f' in {place}' if place else ''}"

    def _reads_values(self, position: int, name: str) -> bool:
        return pir.reads_values_of(self.operators[position], self.value(name))

    def _named(self, values: Iterable[Value]) -> list[str]:
        named = [(pir.key(value), value) for value in values]
        self._values.update(named)
        return [name for name, _ in named]


def _end_of_forward(operations: list[Operation], before: Sequence[Operation] | None) -> int:
    if before is None:
        first = (p for p, operation in enumerate(operations) if operation.has_attr(FIRST_BACKWARD))
        return next(first, len(operations))
    # Paddle inserts operators (stacks of a cond or while) at the front while it appends the
    # backward, so the number of operators from before would be wrong.
    return [operation.id() for operation in operations].index(before[-1].id()) + 1
