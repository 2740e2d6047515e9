"""What `minimize` appends to a Program of PIR: backward, exchange, merge, clip and update."""

from __future__ import annotations

from typing import Any

import paddle

from paddle_recompute._paddle import device
from paddle_recompute._paddle.static import pir, pir_exchange
from paddle_recompute._paddle.static.pir import Operation
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.static_graph._pir_data_parallel import (
    ParamsGrads,
    mean_over_ranks,
    start_as_rank_0,
)
from paddle_recompute.static_graph._pir_gradient_merge import merge_gradients
from paddle_recompute.static_graph._request import Request


def start(program: paddle.static.Program, startup: paddle.static.Program, asked: Request) -> None:
    """Connect the ranks, which start with the parameters of rank 0."""
    if pir_exchange.join_ranks() > 1:
        start_as_rank_0(program, startup, bucket_bytes=asked.bucket_bytes)


def cast_forward(loss: Any, asked: Request) -> Any:
    """`loss`, whose Program must have been built in the precision that is asked for.

    PIR inserts casts while operators are added, so the precision cannot be changed afterwards.

    Raises:
        StaticGraphError: It was built in another precision, and the message says what to write;
            or this CPU has no bfloat16.
    """
    if asked.dtype is not None:
        _check_precision(asked, pir.operations(pir.program_of(loss)))
    return loss


def append_backward(
    optimizer: paddle.optimizer.Optimizer,
    loss: Any,
    startup: paddle.static.Program,
    asked: Request,
) -> ParamsGrads:
    """Parameters and gradients of this rank."""
    return pir.append_backward(optimizer, loss, startup)


def complete(program: paddle.static.Program, asked: Request) -> None:
    """Nothing is left to do for the backward."""


def append_update(
    optimizer: paddle.optimizer.Optimizer,
    loss: Any,
    startup: paddle.static.Program,
    asked: Request,
    params_grads: ParamsGrads,
) -> tuple[list[Operation], ParamsGrads]:
    """As `static_graph.minimize` returns."""
    num_ranks = pir_exchange.join_ranks()

    def update(gradients: ParamsGrads) -> list[Operation]:
        means = mean_over_ranks(gradients, num_ranks=num_ranks, bucket_bytes=asked.bucket_bytes)
        return pir.append_update(optimizer, loss, startup, means)

    program = pir.program_of(loss)
    with pir.editing(program):
        if asked.merge_steps == 1:
            return update(params_grads), params_grads
        pir.create_learning_rate(optimizer)
        operations = merge_gradients(
            params_grads,
            update,
            program=program,
            startup=startup,
            steps=asked.merge_steps,
            average=asked.average,
        )
        return operations, params_grads


def _check_precision(asked: Request, forward: list[Operation]) -> None:
    dtypes = {name: _dtypes(forward, name) for name in {one.name() for one in forward}}
    if any("float16" in found for found in dtypes.values()):
        raise StaticGraphError(
            "the Program computes in float16, which needs loss scaling; static_graph.minimize has "
            "none on Paddle 3.x. Build the Program with dtype='bfloat16'"
        )
    if not any("bfloat16" in found for found in dtypes.values()):
        raise StaticGraphError(
            "the strategy sets amp, but the Program was built in float32, and Paddle 3.x inserts "
            "casts while operators are added; build the model and the loss inside "
            "paddle.amp.auto_cast(True, level='O1', dtype='bfloat16')"
        )
    wrong = [
        f"{name} computes in {other}"
        for names, other in ((asked.white_list, "float32"), (asked.black_list, "bfloat16"))
        for name in names
        if other in dtypes.get(f"pd_op.{name}", ())
    ]
    if wrong:
        raise StaticGraphError(
            f"the Program does not follow amp_configs: {'; '.join(wrong)}. Give custom_white_list "
            "and custom_black_list also to the paddle.amp.auto_cast in which you build the Program"
        )
    device.check_bfloat16()


def _dtypes(operations: list[Operation], name: str) -> set[str]:
    return {
        pir.dtype_name(value)
        for operation in operations
        if operation.name() == name
        for value in pir.operands_of(operation)
    }
