"""A Program of the old representation as a graph: which operators write and read a variable, when.

In the old representation a variable is a name that operators read and write in the order of the
block, perhaps more than once.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import paddle

from paddle_recompute._paddle.static import old_ir
from paddle_recompute._paddle.static.attributes import SCOPE
from paddle_recompute._paddle.static.old_ir import Operator, Variable
from paddle_recompute.recompute.program import graph


class OldIrGraph(graph.Graph):
    """See `graph.Graph`.

    Args:
        program: Before or after its backward was appended.
        before: Its operators before the backward of this loss was appended; backward operators
            among them belong to another loss. None: this loss is the first.
    """

    def __init__(self, program: paddle.static.Program, before: Sequence[Operator] | None = None):
        self._block = old_ir.main_block(program)
        ops = old_ir.operations(program)
        earlier = {id(operator) for operator in before or ()}
        super().__init__(
            old_ir,
            program,
            ops,
            [p for p, op in enumerate(ops) if old_ir.is_forward(op)],
            [p for p, op in enumerate(ops) if old_ir.is_backward(op) and id(op) not in earlier],
        )
        self._sharing: dict[str, list[str]] = {}  # for each name, all names of its memory
        for operator in ops:
            inputs, outputs = old_ir.inputs_of(operator), old_ir.outputs_of(operator)
            inner_read, inner_written = old_ir.named_in_bodies(operator)
            if operator.type == "share_data":
                members = [
                    shared
                    for name in (*inputs, *outputs)
                    for shared in self._sharing.get(name, [name])
                ]
                self._sharing.update(dict.fromkeys(members, members))
            # "depend" lists an output but does not write it.
            written = {*outputs, *inner_written} if operator.type != "depend" else ()
            self._add(inputs, outputs, inner_read, written)

    def value(self, name: str) -> Variable | None:
        return old_ir.variable_of(self._block, name)

    def calls(self) -> dict[str, list[int]]:
        """See `graph.Graph.calls`; AMP puts its casts in front of the operators that need them."""
        grouped: dict[str, list[int]] = {}
        scope: str | None = None
        for position in reversed(self.forward):
            own = self.text(position, SCOPE)
            scope = own if own is not None or self.kind(position) != "cast" else scope
            if scope is not None:
                grouped.setdefault(scope, []).insert(0, position)
        return dict(reversed(grouped.items()))

    def variable(self, name: str) -> str | None:
        """Named as in Paddle's own ``recompute_configs``."""
        return None if self.definer(name) is None else name

    def _why_output_kept(self, name: str, position: int, kept: Container[str]) -> str | None:
        if name in old_ir.shape_only_outputs(self.operators[position]):
            return "it has a shape and no memory"
        return "it is changed in place" if self._is_changed_in_place(name) else None

    def can_wait(self, name: str) -> bool:
        return True

    def is_constant(self, position: int) -> bool:
        if self.inputs(position) or self.kind(position) not in _CONSTANTS:
            return False
        return all(self.num_bytes(name) <= 1024 for name in self.outputs(position))

    def is_given(self, name: str) -> bool:
        definer = self.definer(name)
        is_constant = definer is not None and self.is_constant(definer)
        return is_constant or old_ir.is_persistable(self.value(name))

    def described(self, name: str) -> str:
        return f"{name}[{'x'.join(map(str, old_ir.shape_of(self.value(name)) or ()))}]"

    def _reads_values(self, position: int, name: str) -> bool:
        definer = self.definer(name)
        if definer is not None and name in old_ir.shape_only_outputs(self.operators[definer]):
            return False
        return old_ir.reads_values_of(self.operators[position], name)

    def _is_changed_in_place(self, name: str) -> bool:
        # Parameters do not count: the optimizer writes them after the backward. A detached variable
        # shares memory, so a write to one name changes the other.
        return any(map(self._is_written_again, self._sharing.get(name, [name])))

    def _is_written_again(self, name: str) -> bool:
        writers = self._writers.get(name, [])
        if not self.backward:
            return sum(map(self._is_forward, writers)) > 1
        last = self.backward[-1]
        written = [p for p in writers if p < last and not self._is_backward(p)]
        return len(written) > (0 if old_ir.is_persistable(self.value(name)) else 1)


_CONSTANTS = ("fill_constant", "assign_value", "full_int_array")
