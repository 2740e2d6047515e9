"""Recompute in a Program of the old representation (Paddle 2.6); `_backend` says what each does."""

from __future__ import annotations

import paddle

from paddle_recompute._paddle.static import marks
from paddle_recompute._paddle.translation import builds_whole_graph
from paddle_recompute.errors import StaticGraphError
from paddle_recompute.recompute.program.old_ir.detached import copy_detached
from paddle_recompute.recompute.program.old_ir.graph import OldIrGraph as Graph
from paddle_recompute.recompute.program.old_ir.recompute import carry_out

__all__ = ["Graph", "carry_out", "prepare", "prepare_to_static"]


def prepare(program: paddle.static.Program) -> None:
    """See `_backend.prepare`."""
    copy_detached(program)
    marks.claim_recomputed_calls(program)


def prepare_to_static(layer: str, trains: bool, change: object) -> None:
    """Paddle 2.6 has no hook, so recompute is left out while ``to_static`` builds a Program. That
    changes no number, so a call that does not train, as for ``paddle.jit.save``, goes on.

    Raises:
        StaticGraphError: It builds one, and the call trains.
    """
    if trains and builds_whole_graph():
        raise StaticGraphError(
            f"paddle.jit.to_static met recompute('{layer}') in training mode, and Paddle 2.6 "
            "cannot recompute there; train the model as it is in dygraph, or build a Program and "
            "use static_graph.minimize; only Paddle 3.3 can do both. For paddle.jit.save, call "
            "eval() of the model first, or unwrap() of each wrapped Layer"
        )
