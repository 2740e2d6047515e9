"""Hooks of `paddle.jit.to_static` (3.3): change the Program after its backward was appended.

``jit.dy2static.pir_partial_program`` has hooks for the purpose, ``PartialProgramLayerHook``, and
``PartialProgramLayer.add_hooker`` to give it one; but the layers are made, by the function
``partial_program_from``, in the middle of the first call of what `to_static` returned. So that
function is wrapped. Can go when `to_static` takes hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle
from paddle.jit.dy2static import pir_partial_program

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.attributes import SCOPE

Prepare = Callable[[paddle.static.Program], None]
"""Called with a Program that holds recomputed calls, before its backward is appended."""
Change = Callable[[paddle.static.Program, int], None]
"""Called with a Program that holds recomputed calls, and its number of forward operators."""


@functools.cache
def around_append_backward(prepare: Prepare, change: Change) -> None:
    """From now on, both get every Program of `to_static` that holds recomputed calls."""
    original = pir_partial_program.partial_program_from

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        layer = original(*args, **kwargs)
        layer.add_hooker(_Hook(prepare, change))
        if _has_recomputed_calls(layer._origin_main_program):
            layer.__class__ = _WithoutBackwardUnderNoGrad
        return layer

    pir_partial_program.partial_program_from = hooked


class _WithoutBackwardUnderNoGrad(pir_partial_program.PartialProgramLayer):
    """Runs the Program without a backward where no gradient is wanted.

    Paddle runs the forward of the training Program there, which keeps what its backward would need
    until it ends: without recompute in it, more than the backward itself ever holds.
    """

    _is_training = True

    @property
    def training(self) -> bool:
        return self._is_training and paddle.is_grad_enabled()

    @training.setter
    def training(self, value: bool) -> None:
        self._is_training = value


class _Hook(pir_partial_program.PartialProgramLayerHook):
    def __init__(self, prepare: Prepare, change: Change) -> None:
        self._prepare = prepare
        self._change = change

    def before_append_backward(self, forward_program: Any, src_vars: Any) -> Any:
        if _has_recomputed_calls(forward_program):
            self._prepare(forward_program)
        return forward_program, src_vars

    def after_append_backward(
        self,
        whole_program: Any,
        inputs: Any,
        src_vars: Any,
        grad_outputs: Any,
        forward_end_idx: int,
        backward_start_idx: int,
    ) -> Any:
        if _has_recomputed_calls(whole_program):
            self._change(whole_program, backward_start_idx)
        return whole_program, forward_end_idx, src_vars


def _has_recomputed_calls(program: paddle.static.Program) -> bool:
    return any(operation.has_attr(SCOPE) for operation in pir.operations(program))
