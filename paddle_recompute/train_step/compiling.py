"""`compile_model`: the forward and backward of a model as one Program, with recompute in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import paddle

from paddle_recompute._paddle.static import compiled
from paddle_recompute.errors import (
    ConfigError,
    PaddleRecomputeError,
    StaticGraphError,
    first_sentence,
)
from paddle_recompute.recompute import wrapped_layers
from paddle_recompute.train_step.trusted_programs import ProgramKeeper


@dataclass(frozen=True)
class CompileReport:
    """What `compile_model` did; ``str(report)`` is a sentence.

    Attributes:
        compiled: Whether the model runs as a Program now.
        reason: Why it does not; empty where it does.
        verified: Whether its Programs are compared with eager execution.
    """

    compiled: bool
    reason: str = ""
    verified: bool = True

    def __str__(self) -> str:
        if self.compiled:
            said = "compiled: one Program of paddle.jit.to_static, and one of its backward"
            return said if self.verified else f"{said}, not compared with eager execution"
        return f"not compiled, eager execution goes on: {self.reason}"


def compile_model(
    model: paddle.nn.Layer,
    input_spec: Sequence[paddle.static.InputSpec],
    *,
    or_eager: bool = False,
    verify: bool = True,
) -> CompileReport:
    """Run `model` through ``paddle.jit.to_static(full_graph=True)``, with recompute really applied.

    A model that runs as a Program saves the host's work between operators. What `apply_recompute`
    has wrapped before is recomputed in the Program: its operators are copied into the backward
    (Paddle 3.3). Outputs, gradients and random streams are those of eager execution, bit by bit
    where both run the same kernels, as without a compiler (CINN) they do. Parameters of the branch
    of an ``if`` on a tensor that was not taken get zeros, and in eager execution no gradient.

    The Program is made here, so `model` and what is trained of it stay as they are from now on.
    Evaluation (``model.eval()``, under ``paddle.no_grad()``) is converted when it is first called.
    Without gradients, as in the first forward of a `GradCache`, the Program keeps no activations.

    It computes in the mixed precision that is in force here (``paddle.amp.auto_cast``); a call in
    another one raises.

    Everything else of a step stays in eager execution: the loss, the synchronization (a Program
    hands over all its gradients at the end of its backward, so there is less to overlap), the
    update. A Program needs a backward of its own: ``paddle.grad`` of second order is Paddle's to
    refuse.

    Args:
        model: The Layer that the step calls, not yet in ``paddle.DataParallel``. Its ``forward``
            is replaced; ``model.forward.rollback()`` restores it.
        input_spec: For each argument of its forward, shape and dtype; -1 is a size that varies. A
            size that is given is the only one. Arguments that need a gradient themselves get a
            Program of their own when they first come.
        or_eager: If `model` cannot be converted, leave it as it is, and return the reason. If a
            Program differs from eager execution later, go on without it, with a warning.
        verify: False: trust Paddle's conversion. Its gradients may then be silently wrong.

    Raises:
        StaticGraphError: `model` cannot be converted, and not `or_eager`. On Paddle 2.6 this is
            every wrapped model. A call of the model raises it if the Program computes something
            else than eager execution.
        ConfigError: `model` is compiled already, in ``eval()``, or itself recomputed as a whole.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import compile_model
        >>> model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.GELU())
        >>> print(compile_model(model, [paddle.static.InputSpec([-1, 4], "float32")]))
        compiled: one Program of paddle.jit.to_static, and one of its backward
    """
    if isinstance(model, paddle.DataParallel):
        raise ConfigError("compile_model: give it the Layer inside paddle.DataParallel")
    if compiled.is_compiled(model):
        raise ConfigError("compile_model: the forward of this model is compiled already")
    if any(layer is model for layer in wrapped_layers(model).values()):
        raise ConfigError(
            "compile_model: the model is recomputed as a whole, so its Program would run inside "
            "recompute, which does not see into it; wrap its sublayers instead"
        )
    # A Program is for inputs that need a gradient, or for those that need none, as data does.
    specs = [
        paddle.static.InputSpec(spec.shape, spec.dtype, spec.name, stop_gradient=True)
        for spec in input_spec
    ]
    if not model.training:
        raise ConfigError("compile_model: the model is in eval(); call model.train() before")
    keeper = ProgramKeeper(model, verify=verify, or_eager=or_eager)
    try:
        compiled.compile_layer(model, specs, keeper)
    except (PaddleRecomputeError, *compiled.CONVERSION_ERRORS) as error:
        if compiled.is_compiled(model):
            model.forward.rollback()
        reason = f"paddle.jit.to_static cannot convert {type(model).__name__}: "
        reason += first_sentence(error)
        if or_eager:
            return CompileReport(False, reason)
        raise StaticGraphError(
            f"{reason}. Use train.compile: auto (or_eager=True), which goes on in eager execution"
        ) from error
    return CompileReport(True, verified=verify)
