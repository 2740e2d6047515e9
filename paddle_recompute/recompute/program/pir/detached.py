"""``detach()`` made safe: what it returns gets memory of its own.

``share_data_`` (3.3.1) gives a second name to the memory of its operand. The executor does not ask
for second names before it lets an operator write over an operand that nobody uses any more: in
``y = exp(h) * h.detach()`` the exponential is made in the memory of ``h``, and the product is that
of the exponential with itself, without recompute too. A detached parameter is changed for good.

In dygraph and in the old representation both variables keep their numbers. Where nobody writes to
either on purpose, a copy gives just that. Can go when the executor of Paddle 3.3 is not supported
any more, or asks.
"""

from __future__ import annotations

import paddle

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation
from paddle_recompute.recompute.program.pir.aliasing import Memory
from paddle_recompute.recompute.program.pir.operators import only_shares_memory


def copy_detached(program: paddle.static.Program) -> None:
    """Let what was detached in `program` be a copy; to be called before its backward is appended.

    What somebody changes in place stays as it is, since the other variable has to change with it.
    Costs one copy of each variable that is detached.
    """
    operations = pir.operations(program)
    memory = Memory(operations)
    with pir.editing(program):
        for operation in operations:
            for inner in pir.with_bodies(operation):
                if only_shares_memory(inner) and not _has_memory_of_its_own(inner, memory):
                    pir.copy_operand(inner, inner.operand_source(0))


def _has_memory_of_its_own(operation: Operation, memory: Memory) -> bool:
    """Whether what `operation` shares is a copy already, or has to be shared."""
    value = operation.operand_source(0)
    definer = pir.defining_operation(value)
    is_copy = definer is not None and definer.name() == "pd_op.assign"
    return memory.is_overwritten(value) or (is_copy and len(pir.users_of(value)) == 1)
