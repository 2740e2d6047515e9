"""`compile_model`: the forward and backward of a model as one Program, with recompute in it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddle_recompute import _paddle
from paddle_recompute._paddle.static import compiled
from paddle_recompute.errors import ConfigError, PaddleRecomputeError, StaticGraphError
from paddle_recompute.recompute import wrapped_layers


@dataclass(frozen=True)
class CompileReport:
    """What `compile_model` did; ``str(report)`` is a sentence.

    Attributes:
        compiled: Whether the model runs as a Program now.
        reason: Why it does not; empty where it does.
    """

    compiled: bool
    reason: str = ""

    def __str__(self) -> str:
        if self.compiled:
            return "compiled: one Program of paddle.jit.to_static, and one of its backward"
        return f"not compiled, eager execution goes on: {self.reason}"


def compile_model(
    model: paddle.nn.Layer,
    input_spec: Sequence[paddle.static.InputSpec],
    *,
    or_eager: bool = False,
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
        or_eager: If `model` cannot be converted, leave it as it is, and return the reason.

    Raises:
        StaticGraphError: `model` cannot be converted, and not `or_eager`. On Paddle 2.6 this is
            every wrapped model.
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
        paddle.static.InputSpec(one.shape, one.dtype, one.name, stop_gradient=True)
        for one in input_spec
    ]
    if not model.training:
        raise ConfigError("compile_model: the model is in eval(); call model.train() before")
    before = random.getstate(), np.random.get_state()
    try:
        made = compiled.compile_layer(model, specs, train=model.training)
        if made.has_loops:
            raise StaticGraphError(
                "its forward has a loop over tensors (while, or for over a tensor or one of its "
                "sizes), whose backward may fail or be wrong in a Program of Paddle; loop over "
                "numbers or Layers, or use an operator for the whole tensor"
            )
        if made.in_place:
            raise StaticGraphError(
                f"its forward calls {made.in_place}(), which changes nothing in a Program; use "
                f"{made.in_place[:-1]}() and its result"
            )
        if made.num_outputs != 1:
            raise StaticGraphError(
                f"its forward returns {made.num_outputs} tensors, and Paddle (2.6, 3.3) may "
                "compute one of them in the memory of another, with wrong numbers; return one"
            )
        if made.calls_fleet:
            raise StaticGraphError(
                "it calls fleet's recompute, which to_static drops without a word; call "
                "patch_fleet() before, or use recompute.engine: paddle_recompute"
            )
        if not _same(before, (random.getstate(), np.random.get_state())):
            raise StaticGraphError(
                "its forward draws from Python's random or from NumPy; a Program would repeat the "
                "number that was drawn while it was built. Draw with Paddle, or before the forward"
            )
    except (PaddleRecomputeError, *compiled.CONVERSION_ERRORS) as error:
        if compiled.is_compiled(model):
            model.forward.rollback()
        reason = f"paddle.jit.to_static cannot convert {type(model).__name__}: {_first(error)}"
        if or_eager:
            return CompileReport(False, reason)
        raise StaticGraphError(
            f"{reason}. Use train.compile: auto (or_eager=True), which goes on in eager execution"
        ) from error
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    model.register_forward_pre_hook(_Unchanged(model))
    return CompileReport(True)


class _Unchanged:
    """Before each forward: the Program is that of the model, its parameters and its precision."""

    def __init__(self, model: paddle.nn.Layer) -> None:
        self._forward = model.forward
        self._trained = _trained(model)
        self._modes = _modes(model)
        self._precision = _precision()

    def __deepcopy__(self, memo: Any) -> _Unchanged:
        """Itself, in a copy of a model that was rolled back: it has nothing to check there."""
        return self

    def __call__(self, model: paddle.nn.Layer, inputs: Any) -> None:
        if model.forward is not self._forward:
            return
        if _precision() != self._precision:
            raise StaticGraphError(
                "a compiled model is called in another mixed precision than it was compiled in, "
                "and Paddle would run the same Program; call compile_model inside auto_cast, as "
                "the step does its forward"
            )
        # Without a backward it does not matter what is frozen.
        known, now = self._trained, _trained(model)
        if not model.training:
            known, now = [(one, True) for one, _ in known], [(one, True) for one, _ in now]
        if now != known:
            raise StaticGraphError(
                "parameters of a compiled model were replaced, frozen or unfrozen, and its Program "
                "does not know it; call model.forward.rollback() and compile_model again"
            )
        if not model.training and paddle.is_grad_enabled():
            raise StaticGraphError(
                "a compiled model is called in eval() with gradients on, and its Program for "
                "evaluation has no backward: call it under paddle.no_grad(); to train it without "
                "dropout, set the rates to 0 before compile_model"
            )
        expected = self._modes if model.training else [False] * len(self._modes)
        if _modes(model) != expected:
            raise StaticGraphError(
                "a sublayer of a compiled model was put into train() or eval() by itself, and its "
                "Program does not know it; call model.forward.rollback() and compile_model again"
            )


def _trained(model: paddle.nn.Layer) -> list[tuple[int, bool]]:
    return [(id(parameter), parameter.stop_gradient) for parameter in model.parameters()]


def _modes(model: paddle.nn.Layer) -> list[bool]:
    return [layer.training for layer in model.sublayers(include_self=True)]


def _precision() -> tuple[Any, ...]:
    """The mixed precision in force; a Program is made for one."""
    state = _paddle.amp_state()
    level = str(state.level)
    if level.endswith("O0"):
        return (level,)
    return (level, state.dtype, *map(frozenset, state.lists), state.use_promote)


def _same(first: Any, second: Any) -> bool:
    (python, numpy), (python_now, numpy_now) = first, second
    return python == python_now and all(
        np.array_equal(one, now) for one, now in zip(numpy, numpy_now, strict=True)
    )


def _first(error: BaseException) -> str:
    """The sentence of an error, without Paddle's listing of the transformed code."""
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("In transformed code"):
        own = [line for line in lines if line.partition(":")[0].rpartition(".")[2] == name]
        lines = own or lines[-1:]
    sentence = lines[0] if lines else ""
    return f"{name}: {re.sub(rf'^[a-zA-Z_.]*{name}: ', '', sentence)}"
