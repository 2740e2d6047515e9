"""The pass: segments are computed again, in the backward, when their gradient has arrived.

After ``append_backward`` every backward operator takes the forward's own variables, so all of
them are kept. The pass copies the operators of a segment in front of the first backward operator
that needs one of them, and lets the backward take the copies: the executor then frees the
originals after their last forward use.

Two things make it right. A dropout is not run again but rebuilt from its mask, and an operator
that draws random numbers, changes something in place or has a body is never copied. And a copy is
tied to the gradient that enters its segment: nothing in the data would keep Paddle's
multi-threaded executor from running all copies at once, early, with everything in memory again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation, Value
from paddle_recompute.recompute.program.pir.graph import Graph
from paddle_recompute.recompute.program.pir.operators import is_replayed_from_mask
from paddle_recompute.recompute.program.pir.segments import SEGMENT, Kept, Segment

_logger = logging.getLogger("paddle_recompute")

COPY_OF = "recompute_copy_of"
"""Attribute of a copy: its segment."""
FIRST_BACKWARD = "recompute_first_backward"
"""Attribute of the operator at which the backward begins."""


def recompute(graph: Graph, segments: Iterable[Segment]) -> None:
    """Make the backward of `graph` compute `segments` again; its Program is changed.

    Costs one more run of what is copied, and one copy of what each segment takes from outside.
    """
    segments = list(segments)
    kept = Kept(segments, graph)
    for operation in graph.backward[:1]:
        operation.set_bool_attr(FIRST_BACKWARD, True)
    with pir.editing(graph.program):
        for segment in segments:
            for operation in segment.operations:
                operation.set_str_attr(SEGMENT, segment.name)
            if not _recompute_one(graph, segment, kept):
                _logger.warning(
                    "segment '%s' has nothing to compute again: its backward needs none of its "
                    "%d operators' results but those that are kept",
                    segment.name,
                    len(segment.operations),
                )


def _recompute_one(graph: Graph, segment: Segment, kept: Kept) -> bool:
    needed = [
        value
        for operation in segment.operations
        for value in pir.results_of(operation)
        if graph.backward_readers(value) and value not in kept
    ]
    if not needed:
        return False
    first = min((graph.backward_readers(value)[0] for value in needed), key=graph.position)
    pir.insert_before(first)
    copies = _Copies(graph, kept, _entering_gradient(first, graph), segment.name)
    for operation in _closure(needed, kept, graph):
        copies.add(operation)
    for value in needed:
        # All users change over, the first one too that wants the shape only: a use of the
        # original by any of them is one more reason for the executor to keep it.
        pir.replace_uses(value, copies.of(value), _from(first, graph.backward_users(value), graph))
    return True


def _closure(needed: list[Value], kept: Kept, graph: Graph) -> list[Operation]:
    """The operators that compute `needed` from what is kept, in order."""
    found: dict[int, Operation] = {}
    waiting = list(needed)
    while waiting:
        operation = graph.definer(waiting.pop())
        assert operation is not None  # what is no result of an operator is kept
        position = graph.position(operation)
        if position not in found:
            found[position] = operation
            waiting += [value for value in pir.operands_of(operation) if value not in kept]
    return [operation for _, operation in sorted(found.items())]


def _entering_gradient(first: Operation, graph: Graph) -> Value | None:
    """A gradient that exists when the backward reaches `first`; None at the very start of it."""
    start = len(graph.forward)
    made_before = [
        *(graph.definer(value) for value in pir.operands_of(first)),
        *reversed(graph.backward[: graph.position(first) - start]),
    ]
    for operation in made_before:
        if operation is not None and graph.position(operation) >= start:
            for value in pir.results_of(operation):
                if pir.can_wait(value):
                    return value
    return None


def _from(first: Operation, users: list[Operation], graph: Graph) -> list[Operation]:
    return [user for user in users if graph.position(user) >= graph.position(first)]


class _Copies:
    """The copies of one segment's operators, made at the insertion point."""

    def __init__(self, graph: Graph, kept: Kept, gradient: Value | None, segment: str) -> None:
        self._graph = graph
        self._kept = kept
        self._segment = segment
        self._zero = None if gradient is None else pir.zero_after(gradient)
        self._copy: dict[str, Value] = {}
        self._waiting: set[str] = set()  # keys of originals whose copy cannot exist too early

    def of(self, value: Value) -> Value:
        """The copy of `value`."""
        return self._copy[pir.key(value)]

    def add(self, operation: Operation) -> None:
        """Copy `operation`, whose operands are kept or copied already."""
        operands = pir.operands_of(operation)
        for value in operands:
            if value in self._kept and not self._graph.is_given(value):
                self._hold_back(value)
        if not any(pir.key(value) in self._waiting for value in operands):
            for value in operands:  # for example the cast of a weight, under mixed precision
                self._hold_back(value)
        if is_replayed_from_mask(operation):
            again = [pir.dropout_again(operation, self._copy)]
        else:
            again = list(pir.clone(operation, self._copy).results())
        again[0].get_defining_op().set_str_attr(COPY_OF, self._segment)
        waits = any(pir.key(value) in self._waiting for value in operands)
        for original, copy in zip(operation.results(), again, strict=False):
            if original.initialized():
                self._copy[pir.key(original)] = copy
                if waits:
                    self._waiting.add(pir.key(original))

    def _hold_back(self, value: Value) -> None:
        key = pir.key(value)
        if self._zero is None or key in self._waiting or not pir.can_wait(value):
            return
        self._copy[key] = pir.after(self._copy.get(key, value), self._zero)
        self._waiting.add(key)
