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
    """What the two representations do in ways of their own.

    Attributes:
        native: What Paddle offers to read and mark operators.
        has_fleet: Whether fleet's static graph trains its Programs (2.6).
    """

    native: Native
    has_fleet: bool

    def meet_to_static(self, layer: str) -> None:
        """Be ready for the recomputed call of `layer` being part of `paddle.jit.to_static`.

        Raises:
            StaticGraphError: It is, and would be lost.
        """

    def prepare(self, program: paddle.static.Program) -> None:
        """Make `program` ready for its backward, which is appended afterwards."""

    def graph(self, program: paddle.static.Program, before: Sequence[Any] | None = None) -> Graph:
        """Look at `program`.

        Args:
            program: Before or after its backward was appended.
            before: Its operators before the backward of this loss was appended; None: as the pass
                has left it, or without a backward.
        """

    def carry_out(self, plans: Sequence[Plan], graph: Any, kept: Kept) -> None:
        """Insert what `plans` copy into the Program of `graph`, one of ours."""


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
