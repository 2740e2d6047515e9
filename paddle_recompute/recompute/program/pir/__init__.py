"""Recompute in a Program of PIR (Paddle 3.3); `_backend` says what each name does."""

from __future__ import annotations

import paddle

from paddle_recompute._paddle.static import marks, to_static
from paddle_recompute.recompute.program.pir.bfloat16 import ask_for_both_gradients
from paddle_recompute.recompute.program.pir.detached import copy_detached
from paddle_recompute.recompute.program.pir.graph import PirGraph as Graph
from paddle_recompute.recompute.program.pir.recompute import carry_out

__all__ = ["Graph", "carry_out", "prepare", "prepare_to_static"]


def prepare(program: paddle.static.Program) -> None:
    """See `_backend.prepare`."""
    copy_detached(program)
    ask_for_both_gradients(program)
    marks.claim_recomputed_calls(program)


def prepare_to_static(layer: str, trains: bool, change: to_static.Change) -> None:
    """See `_backend.prepare_to_static`."""
    to_static.around_append_backward(prepare, change)
