"""Products in bfloat16 on a CPU: both factors get a gradient.

oneDNN's gradient of a matrix product in bfloat16 (3.3.1) crashes the process (SIGSEGV) if one
factor needs no gradient: a mask, a constant, a feed, a frozen weight, a detached tensor. So such a
factor asks for a gradient, which is then discarded. The other operators of bfloat16 (``bmm``,
``mv``, ``dot``, arithmetic) do not crash. Can go when oneDNN is fixed.
"""

from __future__ import annotations

import paddle

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Value


def ask_for_both_gradients(program: paddle.static.Program) -> None:
    """Make the products of `program` safe; call this before its backward is appended.

    Costs the factor's gradient, a product of the same size, and sometimes a copy of the factor.
    """
    if paddle.get_device() != "cpu":
        return
    with pir.editing(program):
        for operation in pir.operations(program):
            for inner in pir.with_bodies(operation):
                if inner.name() != "pd_op.matmul":
                    continue
                factors = pir.operands_of(inner)
                if all(term.stop_gradient for term in factors):
                    continue
                for factor in factors:
                    if factor.stop_gradient and pir.dtype_name(factor) == "bfloat16":
                        own = factor if _ends_here(factor) else pir.copy_operand(inner, factor)
                        own.stop_gradient = False


def _ends_here(factor: Value) -> bool:
    """Whether a gradient of `factor` would flow no further, and nothing reads its stop_gradient."""
    definer = pir.defining_operation(factor)
    if definer is None or definer.name() in pir.SOURCES or definer.num_regions():
        return False
    return all(operand.stop_gradient for operand in pir.operands_of(definer))
