"""`minimize` and `RecomputeOptimizer` for both representations of a Program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import paddle

from paddle_recompute._paddle.static import native
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute.program import (
    backend,
    check_recompute,
    named,
    recompute_segments,
)
from paddle_recompute.static_graph._request import Request

if TYPE_CHECKING:
    from paddle.distributed import fleet

Result = TypeVar("Result")


def minimize(
    optimizer: paddle.optimizer.Optimizer,
    loss: Any,
    strategy: fleet.DistributedStrategy,
    *,
    startup_program: paddle.static.Program | None = None,
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Append to the Program of `loss` what trains it: backward, recompute, sync and update.

    Equivalent to ``fleet.distributed_optimizer(optimizer, strategy).minimize(loss)``.

    Args:
        optimizer: Any optimizer of ``paddle.optimizer``; its ``grad_clip`` is honoured.
        loss: The mean loss of the batch; one element, float32, per rank.
        strategy: ``recompute`` (with the names of `mark_checkpoint`), ``amp`` (bf16, O1) and
            ``gradient_merge``.
        startup_program: Program that initializes new variables; the default startup program.

    Returns:
        The operators of the update, and pairs of parameter and gradient, as
        ``optimizer.minimize`` returns them.

    Raises:
        StaticGraphError: The strategy sets what cannot be honoured on this Paddle, or the Program
            lacks its checkpoints; the message names them.
    """
    asked = Request.of(strategy)
    startup = startup_program or paddle.static.default_startup_program()
    with paddle.static.program_guard(native().program_of(loss), startup):
        trained: tuple[list[Any], list[tuple[Any, Any]]] = _of_representation().train(
            optimizer, loss, startup, asked, _differentiated
        )
    return trained


def append_gradients(
    loss: Any, strategy: fleet.DistributedStrategy, parameters: list[Any]
) -> list[tuple[Any, Any]]:
    """Append the backward of `loss`, with recompute and mixed precision, and nothing else.

    Args:
        loss: One element, float32.
        strategy: ``recompute`` and ``amp`` are honoured; nothing is exchanged or updated.
        parameters: Those whose gradients are wanted.

    Returns:
        Pairs of parameter and gradient, without parameters that `loss` does not depend on.

    Raises:
        StaticGraphError: As `minimize` does.
    """
    with paddle.static.program_guard(native().program_of(loss)):
        pairs = _differentiated(
            loss,
            Request.of(strategy),
            lambda loss: paddle.static.append_backward(loss, parameter_list=parameters),
        )
    return [pair for pair in pairs if pair[1] is not None]


def _differentiated(loss: Any, asked: Request, append: Callable[[Any], Result]) -> Result:
    """What ``append(loss)`` returns, which appends a backward; recompute and mixed precision are
    added around it.
    """
    own, program = _of_representation(), native().program_of(loss)
    forward = native().operations(program)
    check_recompute(program, is_asked_for=asked.recompute, names=asked.checkpoints)
    own.cast_forward(program, asked)
    if asked.dtype == "bfloat16" and loss.dtype != paddle.float32:  # it was cast, too
        loss = loss.astype("float32")
    backend().prepare(program)
    appended = append(loss)
    if asked.recompute:
        recompute_segments(program, forward, asked.checkpoints)
    own.complete(program, asked)
    return appended


def cast_forward(program: paddle.static.Program, strategy: fleet.DistributedStrategy) -> None:
    """Bring `program`, which stays without a backward, into the precision of `strategy`.

    PIR has done so while it was built. What is detached gets memory of its own.
    """
    backend().prepare(program)
    if native().HAS_FLEET:
        _of_representation().cast_forward(program, Request.of(strategy))


def _of_representation() -> ModuleType:
    """The module with the three functions that differ between the representations."""
    if native().HAS_FLEET:
        from paddle_recompute.static_graph import _fleet_training

        return _fleet_training
    from paddle_recompute.static_graph import _pir_training

    return _pir_training


class RecomputeOptimizer:
    """An optimizer with recompute for a single device, as in the Paddle guide.

    It has the interface of ``paddle.incubate.optimizer.RecomputeOptimizer`` of 2.6, on both
    versions.

    Args:
        optimizer: Any optimizer of ``paddle.optimizer``.
    """

    def __init__(self, optimizer: paddle.optimizer.Optimizer) -> None:
        self._optimizer = optimizer
        self._checkpoints: list[str] = []

    def _set_checkpoints(self, checkpoints: Sequence[Any]) -> None:
        """Set the recompute boundaries.

        Args:
            checkpoints: Intermediate variables of the Program, or names of `mark_checkpoint`.
        """
        self._checkpoints = [
            checkpoint if isinstance(checkpoint, str) else named(checkpoint)
            for checkpoint in checkpoints
        ]

    def minimize(
        self, loss: Any, startup_program: paddle.static.Program | None = None
    ) -> tuple[list[Any], list[tuple[Any, Any]]]:
        """Like ``optimizer.minimize``, with recompute between the boundaries.

        Raises:
            StaticGraphError: No boundary was set, or the Program of `loss` lacks one.
        """
        from paddle.distributed import fleet

        if not self._checkpoints:
            raise StaticGraphError(
                "RecomputeOptimizer.minimize was called without checkpoints; call "
                "_set_checkpoints([...]) with variables of the Program first"
            )
        strategy = fleet.DistributedStrategy()
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": self._checkpoints}
        return minimize(self._optimizer, loss, strategy, startup_program=startup_program)
