"""What `minimize` appends to a Program of Paddle 2.6: fleet does all but recompute and bfloat16."""

from __future__ import annotations

from typing import Any

import paddle

from paddle_recompute._paddle.static import old_ir, old_ir_fleet
from paddle_recompute._paddle.static.old_ir import Variable
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.static_graph._request import Request


def start(program: paddle.static.Program, startup: paddle.static.Program, asked: Request) -> None:
    """Fleet connects the ranks. A Program is minimized once.

    Raises:
        StaticGraphError: It has an optimizer already.
    """
    if any(old_ir.is_update(one) for one in old_ir.operations(program)):
        # fleet's own second minimize ends the process with SIGSEGV (2.6.2).
        raise StaticGraphError(
            "this Program has an optimizer already, and fleet of Paddle 2.6 cannot add a second "
            "one; minimize one loss per Program, or use Paddle 3.3"
        )


def cast_forward(loss: Variable, asked: Request) -> Variable:
    """`loss`, in float32, of a Program whose forward is cast to bfloat16 if that is asked for."""
    cast_program(old_ir.program_of(loss), asked)
    is_cast = asked.dtype == "bfloat16" and loss.dtype != paddle.float32
    return loss.astype("float32") if is_cast else loss


def cast_program(program: paddle.static.Program, asked: Request) -> None:
    """Cast the forward of `program` to bfloat16 if that is asked for."""
    if asked.dtype == "bfloat16":
        old_ir_fleet.cast_to_bfloat16(
            program,
            white_list=asked.white_list,
            black_list=asked.black_list,
            black_variables=asked.black_variables,
        )


def append_backward(
    optimizer: paddle.optimizer.Optimizer,
    loss: Variable,
    startup: paddle.static.Program,
    asked: Request,
) -> tuple[list[Any], list[tuple[Variable, Variable]]]:
    """Fleet appends everything at once, and this is what its ``minimize`` returns."""
    return old_ir_fleet.fleet_minimize(optimizer, loss, asked.of_fleet, startup)


def complete(program: paddle.static.Program, asked: Request) -> None:
    """Let the backward of a Program in bfloat16 compute all its gradients."""
    if asked.dtype == "bfloat16":
        old_ir_fleet.complete_bfloat16_gradients(program)


def append_update(
    optimizer: paddle.optimizer.Optimizer,
    loss: Variable,
    startup: paddle.static.Program,
    asked: Request,
    appended: tuple[list[Any], list[tuple[Variable, Variable]]],
) -> tuple[list[Any], list[tuple[Variable, Variable]]]:
    """Nothing more: fleet has `appended` the update with the backward."""
    return appended
