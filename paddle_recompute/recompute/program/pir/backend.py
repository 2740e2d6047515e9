"""What is specific to recompute in a Program of PIR (Paddle 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from paddle_recompute._paddle.static import marks, pir, to_static
from paddle_recompute._paddle.static.interface import Native
from paddle_recompute._paddle.static.pir import Operation
from paddle_recompute.recompute.program.pir.bfloat16 import ask_for_both_gradients
from paddle_recompute.recompute.program.pir.detached import copy_detached
from paddle_recompute.recompute.program.pir.graph import Graph
from paddle_recompute.recompute.program.pir.recompute import carry_out
from paddle_recompute.recompute.program.plan import Plan
from paddle_recompute.recompute.program.recompute import recompute_segments
from paddle_recompute.recompute.program.segments import Kept


class PirBackend:
    """See `Backend`."""

    native: Native = pir
    has_fleet = False

    def prepare_to_static(self, layer: str) -> None:
        """`to_static` appends its backward itself, so the pass hooks in there."""
        to_static.around_append_backward(_prepare, _recompute_calls)

    def prepare(self, program: paddle.static.Program) -> None:
        _prepare(program)

    def graph(
        self, program: paddle.static.Program, before: Sequence[Operation] | None = None
    ) -> Graph:
        return Graph(program, before)

    def carry_out(self, plans: Sequence[Plan], graph: Graph, kept: Kept) -> None:
        carry_out(plans, graph, kept)


def _prepare(program: paddle.static.Program) -> None:
    copy_detached(program)
    ask_for_both_gradients(program)
    marks.claim_recomputed_calls(pir, program)


def _recompute_calls(program: paddle.static.Program, num_forward: int) -> None:
    recompute_segments(program, pir.operations(program)[:num_forward], ())
