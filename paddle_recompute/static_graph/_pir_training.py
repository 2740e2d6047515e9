"""What `minimize` appends to a Program of PIR: backward, exchange, merge, clip and update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from paddle_recompute._paddle import device
from paddle_recompute._paddle.static import pir, pir_exchange, pir_update
from paddle_recompute._paddle.static.pir import Operation
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.static_graph._pir_data_parallel import (
    ParamsGrads,
    mean_over_ranks,
    start_as_rank_0,
)
from paddle_recompute.static_graph._request import Request


def cast_forward(program: paddle.static.Program, asked: Request) -> None:
    """Check that `program` was built in the precision that is asked for.

    PIR inserts casts while operators are added, so the precision cannot be changed afterwards.

    Raises:
        StaticGraphError: It was built in another precision, and the message says what to write;
            or this CPU has no bfloat16.
    """
    if asked.dtype is not None:
        _check_precision(asked, pir.operations(program))


def complete(program: paddle.static.Program, asked: Request) -> None:
    """Nothing is left to do for the backward."""


def train(
    optimizer: paddle.optimizer.Optimizer,
    loss: Any,
    startup: paddle.static.Program,
    asked: Request,
    differentiate: Callable[..., ParamsGrads],
) -> tuple[list[Operation], ParamsGrads]:
    """As `static_graph.minimize` returns; the ranks start with the parameters of rank 0."""
    program, num_ranks = pir.program_of(loss), pir_exchange.join_ranks()
    if num_ranks > 1:
        start_as_rank_0(program, startup, bucket_bytes=asked.bucket_bytes)
    params_grads = differentiate(
        loss, asked, lambda loss: pir_update.append_backward(optimizer, loss, startup)
    )

    def update(gradients: ParamsGrads) -> list[Operation]:
        means = mean_over_ranks(gradients, num_ranks=num_ranks, bucket_bytes=asked.bucket_bytes)
        return pir_update.append_update(optimizer, loss, startup, means)

    with pir.editing(program):
        if asked.merge_steps == 1:
            return update(params_grads), params_grads
        pir_update.create_learning_rate(optimizer)
        return _merged(params_grads, update, program, startup, asked), params_grads


def _merged(
    params_grads: ParamsGrads,
    update: Callable[[ParamsGrads], list[Operation]],
    program: paddle.static.Program,
    startup: paddle.static.Program,
    asked: Request,
) -> list[Operation]:
    """Append ``sum += gradient`` and, under a condition, the update with the sums.

    As fleet does it on 2.6: the operators that `update` appends (exchange, clip, decay, optimizer)
    run in every k-th run only, and then the sums are set to zero.

    Returns:
        The operators appended to the top level: the additions, and the conditional update.
    """
    sums = []
    for parameter, gradient in params_grads:
        name = f"{parameter.name}@GRAD@MERGED"
        sums.append((parameter, pir.persistable(name, gradient, startup, program)))
    runs = pir.persistable("gradient_merge@RUNS", None, startup, program)
    appended_from = len(pir.operations(program))
    for (_, total), (_, gradient) in zip(sums, params_grads, strict=True):
        pir.add_in_place(total, gradient)
    pir_update.count_up_in_place(runs)
    steps = asked.merge_steps

    def update_and_start_again() -> None:
        factor = 1.0 / steps if asked.average else 1.0
        update([(parameter, paddle.scale(total, factor)) for parameter, total in sums])
        for _, total in sums:
            pir.fill_in_place(total, 0.0)

    is_due: Any = paddle.equal(
        paddle.remainder(runs, paddle.full([1], steps, "int32")), paddle.zeros([1], "int32")
    )
    paddle.static.nn.cond(is_due, update_and_start_again, None)
    return pir.operations(program)[appended_from:]


def _check_precision(asked: Request, forward: list[Operation]) -> None:
    dtypes = {name: _dtypes(forward, name) for name in {operation.name() for operation in forward}}
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
