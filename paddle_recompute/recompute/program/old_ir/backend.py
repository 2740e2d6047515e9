"""What is specific to recompute in a Program of the old representation (Paddle 2.6)."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddle_recompute._paddle.static import marks, old_ir
from paddle_recompute._paddle.static.interface import Native
from paddle_recompute._paddle.static.old_ir import Operator
from paddle_recompute.recompute.program.old_ir.detached import copy_detached
from paddle_recompute.recompute.program.old_ir.graph import Graph
from paddle_recompute.recompute.program.old_ir.recompute import carry_out
from paddle_recompute.recompute.program.plan import Plan
from paddle_recompute.recompute.program.segments import Kept


class OldIrBackend:
    """See `Backend`."""

    native: Native = old_ir
    has_fleet = True

    def prepare_to_static(self, layer: str) -> None:
        old_ir.refuse_to_static(layer)

    def prepare(self, program: paddle.static.Program) -> None:
        copy_detached(program)
        marks.claim_recomputed_calls(old_ir, program)

    def graph(
        self, program: paddle.static.Program, before: Sequence[Operator] | None = None
    ) -> Graph:
        return Graph(program, before)

    def carry_out(self, plans: Sequence[Plan], graph: Graph, kept: Kept) -> None:
        carry_out(plans, graph, kept)
