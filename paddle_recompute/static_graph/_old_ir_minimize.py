"""`minimize` for the old representation: fleet does everything but recompute and bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import paddle

from paddle_recompute._paddle.static import old_ir, old_ir_fleet
from paddle_recompute._paddle.static.old_ir import Operator, Variable
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute.program import backend, check_recompute, recompute_segments
from paddle_recompute.static_graph.strategy import amp_dtype

if TYPE_CHECKING:
    from paddle.distributed import fleet

Result = TypeVar("Result")


def minimize(
    optimizer: paddle.optimizer.Optimizer,
    loss: Variable,
    strategy: fleet.DistributedStrategy,
    *,
    startup_program: paddle.static.Program | None = None,
) -> tuple[list[Operator], list[tuple[Variable, Variable]]]:
    """As `static_graph.minimize`, once per Program."""
    startup = startup_program or paddle.static.default_startup_program()
    if any(old_ir.is_update(one) for one in old_ir.operations(old_ir.program_of(loss))):
        # fleet's own second minimize ends the process with SIGSEGV (2.6.2).
        raise StaticGraphError(
            "this Program has an optimizer already, and fleet of Paddle 2.6 cannot add a second "
            "one; minimize one loss per Program, or use Paddle 3.3"
        )
    return _differentiated(
        loss,
        strategy,
        startup,
        lambda loss, rest: old_ir_fleet.fleet_minimize(optimizer, loss, rest, startup),
    )


def append_gradients(
    loss: Variable, strategy: fleet.DistributedStrategy, parameters: list[Variable]
) -> list[tuple[Variable, Variable]]:
    """As `static_graph.minimize.append_gradients`."""
    return _differentiated(
        loss,
        strategy,
        paddle.static.default_startup_program(),
        lambda loss, _: paddle.static.append_backward(loss, parameter_list=parameters),
    )


def cast_forward(program: paddle.static.Program, strategy: fleet.DistributedStrategy) -> None:
    """As `static_graph.minimize.cast_forward`."""
    if amp_dtype(strategy) == "bfloat16":
        lists = strategy.amp_configs
        old_ir_fleet.cast_to_bfloat16(
            program,
            white_list=lists["custom_white_list"],
            black_list=lists["custom_black_list"],
            black_variables=lists["custom_black_varnames"],
        )


def _differentiated(
    loss: Variable,
    strategy: fleet.DistributedStrategy,
    startup: paddle.static.Program,
    append: Callable[[Variable, fleet.DistributedStrategy], Result],
) -> Result:
    """What ``append(loss, strategy)`` returns, which appends a backward, with our recompute and
    bfloat16 around it.
    """
    strategy = copy.deepcopy(strategy)
    program = old_ir.program_of(loss)
    checkpoints = tuple(strategy.recompute_configs["checkpoints"])
    recomputes, strategy.recompute = bool(strategy.recompute), False
    if recomputes:
        _refuse_offload(strategy)
    check_recompute(program, is_asked_for=recomputes, names=checkpoints)
    is_bfloat16 = amp_dtype(strategy) == "bfloat16"
    before = old_ir.operations(program)
    with paddle.static.program_guard(program, startup):
        if is_bfloat16:
            cast_forward(program, strategy)
            strategy.amp = False
            if loss.dtype != paddle.float32:
                loss = loss.astype("float32")
        backend().prepare(program)
        result = append(loss, strategy)
        if recomputes:
            recompute_segments(program, before, checkpoints)
        if is_bfloat16:
            old_ir_fleet.complete_bfloat16_gradients(program)
    return result


def _refuse_offload(strategy: Any) -> None:
    if strategy.recompute_configs["enable_offload"]:
        raise StaticGraphError(
            "the strategy sets recompute_configs.enable_offload, which static_graph.minimize does "
            "not support; leave it at False, or train in dygraph with recompute.offload: host"
        )
