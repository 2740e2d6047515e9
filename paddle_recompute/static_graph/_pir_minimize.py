"""`minimize` for PIR: backward, recompute, exchange, merge, clip and update, in this order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from paddle_recompute._paddle.static import pir, pir_exchange
from paddle_recompute._paddle.static.pir import Operation
from paddle_recompute.recompute.program import backend, check_recompute, recompute_segments
from paddle_recompute.static_graph._parse_strategy import ParsedStrategy, check_amp
from paddle_recompute.static_graph._pir_data_parallel import (
    ParamsGrads,
    mean_over_ranks,
    start_as_rank_0,
)
from paddle_recompute.static_graph._pir_gradient_merge import merge_gradients


def minimize(
    optimizer: paddle.optimizer.Optimizer,
    loss: Any,
    strategy: Any,
    *,
    startup_program: paddle.static.Program | None = None,
) -> tuple[list[Operation], ParamsGrads]:
    """As `static_graph.minimize`."""
    requested = ParsedStrategy.of(strategy)
    program = pir.program_of(loss)
    startup = startup_program or paddle.static.default_startup_program()
    with paddle.static.program_guard(program, startup):
        num_ranks = pir_exchange.join_ranks()
        if num_ranks > 1:
            start_as_rank_0(program, startup, bucket_bytes=requested.bucket_bytes)
        params_grads = _differentiated(
            program, requested, lambda: pir.append_backward(optimizer, loss, startup)
        )

        def update(gradients: ParamsGrads) -> list[Operation]:
            means = mean_over_ranks(
                gradients, num_ranks=num_ranks, bucket_bytes=requested.bucket_bytes
            )
            return pir.append_update(optimizer, loss, startup, means)

        with pir.editing(program):
            if requested.merge_steps == 1:
                return update(params_grads), params_grads
            pir.create_learning_rate(optimizer)
            operations = merge_gradients(
                params_grads,
                update,
                program=program,
                startup=startup,
                steps=requested.merge_steps,
                average=requested.average,
            )
            return operations, params_grads


def append_gradients(loss: Any, strategy: Any, parameters: list[Any]) -> ParamsGrads:
    """As `static_graph.minimize.append_gradients`."""
    return _differentiated(
        pir.program_of(loss),
        ParsedStrategy.of(strategy),
        lambda: paddle.static.append_backward(loss, parameter_list=parameters),
    )


def _differentiated(
    program: paddle.static.Program, requested: ParsedStrategy, append: Callable[[], ParamsGrads]
) -> ParamsGrads:
    """What `append` returns, which appends a backward, with our recompute."""
    forward = pir.operations(program)
    check_amp(requested, forward)
    check_recompute(program, is_asked_for=requested.recompute, names=requested.checkpoints)
    backend().prepare(program)
    params_grads = append()
    if requested.recompute:
        recompute_segments(program, forward, requested.checkpoints)
    return params_grads
