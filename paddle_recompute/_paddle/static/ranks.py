"""Sums over the ranks as operators of a Program's forward, in either representation."""

from __future__ import annotations

from typing import Any

import paddle

from paddle_recompute._paddle.static import native

Variable = Any

_OPERATORS = ("c_allreduce_sum", "pd_op.all_reduce")


def sum_over_ranks(variable: Variable) -> Variable:
    """The sum of `variable` over all ranks, of the same shape on each; it has no gradient.

    The public ``paddle.distributed.all_reduce`` changes its argument in place, which a backward
    may need. No version has a sum or a gather with a gradient here: ``c_identity``, whose gradient
    is a sum, has no CPU kernel in 2.6 and none comes out of it in PIR (3.3.1); ``PyLayer`` is for
    dygraph.
    """
    if native().HAS_FLEET:
        from paddle_recompute._paddle.static import old_ir_fleet as exchange
    else:
        from paddle_recompute._paddle.static import pir_exchange as exchange  # type: ignore[no-redef]
    total = exchange.sum_over_ranks(variable)
    total.stop_gradient = True
    return total


def has_sums(program: paddle.static.Program) -> bool:
    """Whether the ranks exchange something in `program`; in its forward, before `minimize`."""
    own = native()
    return any(own.kind(operation) in _OPERATORS for operation in own.operations(program))
