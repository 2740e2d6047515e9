"""Which variables of a Program share memory, and which memory is written to again.

PIR states both for an operator, but Paddle ignores it: later operators and their backward still use
the variable from before (``x[:, 0] = 1`` appends ``set_value_(x)``, and later operators take ``x``,
not the result), and the executor lets an operator overwrite an operand after its last use without
checking who shares its memory. So the pass keeps such variables.
"""

from __future__ import annotations

from collections.abc import Iterable

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation, Value
from paddle_recompute.recompute.program.operators import UNKNOWN, why_kept


class Memory:
    """The memory of the variables of some operators.

    Args:
        operations: All top-level operators that may change or share memory; bodies are included.
    """

    def __init__(self, operations: Iterable[Operation]) -> None:
        self._leader: dict[str, str] = {}
        self._written: set[str] = set()  # leaders
        for operation in operations:
            for inner in pir.with_bodies(operation):
                self._add(inner)

    def is_shared(self, value: Value) -> bool:
        """Whether the memory of `value` may be that of another variable."""
        return pir.key(value) in self._leader

    def is_overwritten(self, value: Value) -> bool:
        """Whether an operator writes to the memory of `value` after it was computed."""
        return self.is_shared(value) and self._lead(pir.key(value)) in self._written

    def _add(self, operation: Operation) -> None:
        for operand, result in pir.in_place(operation):
            group = self._joined(operand, result)
            if operation.name() != pir.SHARE_DATA:
                self._written.add(group)
        if why_kept(pir, operation) == UNKNOWN:  # it may do so without PIR stating it
            for operand in pir.operands_of(operation):
                self._joined(operand, *pir.results_of(operation))

    def _joined(self, *values: Value) -> str:
        leaders = {self._lead(pir.key(value)) for value in values}
        first = min(leaders)
        for leader in leaders:
            self._leader[leader] = first
        if leaders & self._written:
            self._written.add(first)
        return first

    def _lead(self, key: str) -> str:
        leader = self._leader.setdefault(key, key)
        while leader != self._leader[leader]:
            leader = self._leader[leader]
        return leader
