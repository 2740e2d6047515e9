"""``detach()`` made safe: its result gets memory of its own.

``share_data_`` (3.3.1) gives a second name to the memory of its operand. The executor lets an
operator overwrite an operand after its last use and ignores second names: in
``y = exp(h) * h.detach()`` the exponential overwrites ``h``, and is then multiplied by itself, also
without recompute. A detached parameter is changed for good.

In dygraph and in the old representation both variables keep their values. If neither is written to
on purpose, a copy is equivalent. Can go when the executor respects second names, or with Paddle
3.3.
"""

from __future__ import annotations

import paddle

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation
from paddle_recompute.recompute.program.pir.aliasing import Memory


def copy_detached(program: paddle.static.Program) -> None:
    """Replace ``share_data_`` in `program` by copies; call this before its backward is appended.

    A variable that is changed in place on purpose is skipped, because both names must change.
    Costs one copy of each detached variable.
    """
    operations = pir.operations(program)
    memory = Memory(operations)
    with pir.editing(program):
        for operation in operations:
            for inner in pir.with_bodies(operation):
                if inner.name() == pir.SHARE_DATA and not _has_memory_of_its_own(inner, memory):
                    pir.copy_operand(inner, inner.operand_source(0))


def _has_memory_of_its_own(operation: Operation, memory: Memory) -> bool:
    """Whether the result of `operation` is a copy already, or must stay shared."""
    value = operation.operand_source(0)
    definer = pir.defining_operation(value)
    is_copy = definer is not None and definer.name() == "pd_op.assign"
    return memory.is_overwritten(value) or (is_copy and len(pir.users_of(value)) == 1)
