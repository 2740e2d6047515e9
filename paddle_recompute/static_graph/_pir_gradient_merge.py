"""Gradient merge: sum the gradients of k runs and update the parameters in every k-th run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.pir import Operation
from paddle_recompute.static_graph._pir_data_parallel import ParamsGrads


def merge_gradients(
    params_grads: ParamsGrads,
    update: Callable[[ParamsGrads], list[Operation]],
    *,
    program: paddle.static.Program,
    startup: paddle.static.Program,
    steps: int,
    average: bool,
) -> list[Operation]:
    """Append ``sum += gradient`` and, under a condition, the update with the sums.

    As fleet does it on 2.6: the operators that `update` appends (exchange, clip, decay, optimizer)
    run in every `steps`-th run only, and then the sums are set to zero.

    Args:
        params_grads: Parameter and gradient of one run.
        update: Appends the update for given parameters and gradients.
        program: Program to append to.
        startup: Program that sets the sums and the counter of runs to zero.
        steps: Runs per update.
        average: Whether `update` gets the mean of the gradients over the runs, not their sum.

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
    pir.count_up_in_place(runs)

    def update_and_start_again() -> None:
        factor = 1.0 / steps if average else 1.0
        update([(parameter, paddle.scale(total, factor)) for parameter, total in sums])
        for _, total in sums:
            pir.fill_in_place(total, 0.0)

    is_due: Any = paddle.equal(
        paddle.remainder(runs, paddle.full([1], steps, "int32")), paddle.zeros([1], "int32")
    )
    paddle.static.nn.cond(is_due, update_and_start_again, None)
    return pir.operations(program)[appended_from:]
