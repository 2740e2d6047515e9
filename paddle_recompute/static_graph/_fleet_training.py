"""What `minimize` appends to a Program of Paddle 2.6: fleet does all but recompute and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from paddle_recompute._paddle.static import old_ir, old_ir_fleet
from paddle_recompute._paddle.static.old_ir import Variable
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.static_graph._request import Request

Trained = tuple[list[Any], list[tuple[Variable, Variable]]]


def cast_forward(program: paddle.static.Program, asked: Request) -> None:
    """Cast the forward of `program` to bfloat16 if that is asked for."""
    if asked.dtype == "bfloat16":
        old_ir_fleet.cast_to_bfloat16(
            program,
            white_list=asked.white_list,
            black_list=asked.black_list,
            black_variables=asked.black_variables,
        )


def complete(program: paddle.static.Program, asked: Request) -> None:
    """Let the backward of a Program in bfloat16 compute all its gradients."""
    if asked.dtype == "bfloat16":
        old_ir_fleet.complete_bfloat16_gradients(program)


def train(
    optimizer: paddle.optimizer.Optimizer,
    loss: Variable,
    startup: paddle.static.Program,
    asked: Request,
    differentiate: Callable[..., Trained],
) -> Trained:
    """What fleet's ``minimize`` returns, which connects the ranks and appends everything at once.

    Raises:
        StaticGraphError: The Program has an optimizer already.
    """
    if any(old_ir.is_update(operation) for operation in old_ir.operations(old_ir.program_of(loss))):
        # fleet's own second minimize ends the process with SIGSEGV (2.6.2).
        raise StaticGraphError(
            "this Program has an optimizer already, and fleet of Paddle 2.6 cannot add a second "
            "one; minimize one loss per Program, or use Paddle 3.3"
        )
    return differentiate(
        loss,
        asked,
        lambda loss: old_ir_fleet.fleet_minimize(optimizer, loss, asked.of_fleet, startup),
    )
