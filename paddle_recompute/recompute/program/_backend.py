"""The one place that asks which representation the installed Paddle builds Programs in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import paddle

from paddle_recompute._paddle.static import representation
from paddle_recompute._paddle.static.interface import Native
from paddle_recompute.recompute.program.graph import Graph
from paddle_recompute.recompute.program.plan import Plan
from paddle_recompute.recompute.program.segments import Kept


class Backend(Protocol):
    """What differs between the two representations.

    Attributes:
        native: Paddle's functions to read and mark operators.
        has_fleet: Whether fleet's static graph trains its Programs (2.6).
    """

    native: Native
    has_fleet: bool

    def prepare_to_static(self, layer: str) -> None:
        """Prepare for a recomputed call of `layer` inside `paddle.jit.to_static`.

        Raises:
            StaticGraphError: The call is inside it, and would not be recomputed.
        """

    def prepare(self, program: paddle.static.Program) -> None:
        """Prepare `program` before its backward is appended."""

    def graph(self, program: paddle.static.Program, before: Sequence[Any] | None = None) -> Graph:
        """The graph of `program`.

        Args:
            program: Before or after its backward was appended.
            before: Its operators before the backward of this loss was appended; None: the Program
                has no backward, or the pass was applied.
        """

    def carry_out(self, plans: Sequence[Plan], graph: Any, kept: Kept) -> None:
        """Insert the copies of `plans` into the Program of `graph`, a graph of this backend."""


def backend() -> Backend:
    """The backend of the installed Paddle.

    Raises:
        StaticGraphError: This Paddle's static graph is not known.
    """
    if representation() == "pir":
        from paddle_recompute.recompute.program.pir.backend import PirBackend

        return PirBackend()
    from paddle_recompute.recompute.program.old_ir.backend import OldIrBackend

    return OldIrBackend()
