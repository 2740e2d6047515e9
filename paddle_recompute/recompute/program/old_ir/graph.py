"""A Program of the old representation as a graph: who writes what, who reads it, and when.

In the old representation a variable is a name that operators write to and read from, in the order
of the block, perhaps more than once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container

import paddle

from paddle_recompute._paddle.static import old_ir
from paddle_recompute._paddle.static.old_ir import Operator


class Graph:
    """The operators of one Program as they stand at the moment; positions change with the Program.

    Attributes:
        program: The Program.
        block: Its main block.
        operators: All operators, in order.
        forward: Positions of the operators that compute losses.
        backward: Positions of the operators that compute the gradients of this loss.
    """

    def __init__(
        self, program: paddle.static.Program, *, earlier: Container[int] = frozenset()
    ) -> None:
        """Look at `program`.

        Args:
            program: Before or after its backward was appended.
            earlier: ``id`` of the operators that belong to the backward of another loss.
        """
        self.program = program
        self.block = old_ir.main_block(program)
        self.operators: list[Operator] = list(self.block.ops)
        self.forward: list[int] = []
        self.backward: list[int] = []
        self._readers: dict[str, list[int]] = defaultdict(list)
        self._writers: dict[str, list[int]] = defaultdict(list)
        self._used_in_bodies: set[str] = set()
        self._inputs: list[list[str]] = []
        self._outputs: list[list[str]] = []
        for position, operator in enumerate(self.operators):
            if old_ir.is_forward(operator):
                self.forward.append(position)
            elif old_ir.is_backward(operator) and id(operator) not in earlier:
                self.backward.append(position)
            self._add(position, operator)
        self._is_forward = frozenset(self.forward).__contains__
        self._is_in_backward = frozenset(self.backward).__contains__

    def _add(self, position: int, operator: Operator) -> None:
        inputs, outputs = old_ir.inputs_of(operator), old_ir.outputs_of(operator)
        self._inputs.append(inputs)
        self._outputs.append(outputs)
        inner_read, inner_written = old_ir.named_in_bodies(operator)
        self._used_in_bodies |= inner_read
        for name in {*inputs, *inner_read}:
            self._readers[name].append(position)
        if operator.type != "depend":  # which says that it writes, and does not
            for name in {*outputs, *inner_written}:
                self._writers[name].append(position)

    @property
    def has_recomputed_calls(self) -> bool:
        """Whether the Program holds calls of recomputed Layers."""
        return any(self.operators[p].has_attr(old_ir.SCOPE) for p in self.forward)

    def inputs(self, position: int) -> list[str]:
        """Names of what the operator at `position` reads."""
        return self._inputs[position]

    def outputs(self, position: int) -> list[str]:
        """Names of what the operator at `position` writes."""
        return self._outputs[position]

    def writer(self, name: str) -> int | None:
        """The position of the forward operator that computes `name`; None: it was there before."""
        return next((p for p in self._writers.get(name, ()) if self._is_forward(p)), None)

    def is_changed_in_place(self, name: str) -> bool:
        """Whether the numbers in `name` change between a forward operator and the backward.

        A parameter is written by its optimizer, which comes after.
        """
        writers = self._writers.get(name, [])
        if not self.backward:
            return sum(map(self._is_forward, writers)) > 1
        last = self.backward[-1]
        written = [p for p in writers if p < last and not self._is_in_backward(p)]
        return len(written) > (0 if old_ir.is_persistable(self.block, name) else 1)

    def is_used_in_a_body(self, name: str) -> bool:
        """Whether an operator inside the body of a cond or while reads `name`."""
        return name in self._used_in_bodies

    def is_constant(self, position: int) -> bool:
        """Whether the operator makes a small constant out of nothing."""
        if self._inputs[position] or self.operators[position].type not in _CONSTANTS:
            return False
        return all(old_ir.num_bytes(self.block, n) <= 1024 for n in self._outputs[position])

    def forward_readers(self, name: str) -> list[int]:
        """Positions of the forward operators that read `name`."""
        return [p for p in self._readers.get(name, ()) if self._is_forward(p)]

    def backward_readers(self, name: str) -> list[int]:
        """Positions of the backward operators of this loss that read `name`."""
        return [p for p in self._readers.get(name, ()) if self._is_in_backward(p)]


_CONSTANTS = ("fill_constant", "assign_value", "full_int_array")
