"""The copies of operators in PIR: new Values, which the backward takes instead."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_recompute._paddle.static import pir
from paddle_recompute._paddle.static.attributes import COPY_OF
from paddle_recompute._paddle.static.pir import Value
from paddle_recompute.recompute.program.pir.graph import FIRST_BACKWARD, PirGraph
from paddle_recompute.recompute.program.plan import Plan


def carry_out(plans: Sequence[Plan], graph: PirGraph) -> None:
    """Insert the copies of `plans`, and let the backward take them.

    Also costs one copy of each value that a segment takes from outside.
    """
    for position in graph.backward[:1]:
        graph.write_text(position, FIRST_BACKWARD, "yes")
    with pir.editing(graph.program):
        for plan in plans:
            _carry_out(plan, graph)


def _carry_out(plan: Plan, graph: PirGraph) -> None:
    pir.insert_before(graph.operators[plan.at])
    zero = pir.zero_after(graph.value(plan.gradients[0])) if plan.gradients else None
    copies: dict[str, Value] = {}
    for position, held_back in zip(plan.copied, plan.held_back, strict=True):
        operation = graph.operators[position]
        for name in graph.inputs(position):
            if name not in copies and graph.shares_memory(name):
                # The executor may overwrite what is made of it.
                copies[name] = pir.copy_after(graph.value(name), zero)
        for name in held_back:
            if zero is not None and not graph.shares_memory(name):
                copies[name] = pir.after(copies.get(name, graph.value(name)), zero)
        statistics = {
            name: pir.copy_after(graph.value(name), zero)
            for name in graph.running_statistics(position)
        }
        if graph.mask(position) is not None:
            again = [pir.dropout_again(operation, copies)]
        else:
            again = pir.results_of(pir.clone(operation, {**copies, **statistics}))
        pir.write_text(again[0].get_defining_op(), COPY_OF, plan.segment)
        copies.update(zip(graph.outputs(position), again, strict=False))
    for name in plan.needed:
        users = [graph.operators[reader] for reader in plan.readers(name, graph)]
        pir.replace_uses(graph.value(name), copies[name], users)
