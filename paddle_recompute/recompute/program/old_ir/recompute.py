"""The copies of operators in Paddle 2.6: new names, which the backward reads instead.

Paddle 2.6 has a pass for this (``DistributedStrategy.recompute``, ``RecomputeOptimizer``). Ours
replaces it because Paddle's pass

- draws the seed of every dropout from ``std::random_device``: a run cannot be repeated with
  ``paddle.seed``, nor compared with the run without recompute. Ours computes a dropout from its
  mask, so both runs have equal losses bit by bit;
- saves next to nothing under the multi-threaded executor (`old_ir.hold_back_before`);
- updates the running statistics of a BatchNorm twice, and refuses cond and while;
- silently drops a checkpoint if the next one is not computed from it, as between the two encoders
  of a dual encoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from paddle_recompute._paddle.static import old_ir
from paddle_recompute._paddle.static.marks import COPY_OF
from paddle_recompute.recompute.program.old_ir.graph import Graph
from paddle_recompute.recompute.program.old_ir.operators import running_statistics
from paddle_recompute.recompute.program.plan import Plan
from paddle_recompute.recompute.program.segments import Kept


def carry_out(plans: Sequence[Plan], graph: Graph, kept: Kept) -> None:
    """Insert the copies of `plans`, and let the backward read them."""
    # The last plan first, so that the positions of the others stay valid.
    for plan in sorted(plans, key=lambda plan: plan.at, reverse=True):
        _carry_out(plan, graph, kept)
    old_ir.finish_changes(graph.program)


def _carry_out(plan: Plan, graph: Graph, kept: Kept) -> None:
    block = old_ir.main_block(graph.program)
    renamed = {
        name: old_ir.new_variable_like(block, name, "RECOMPUTED")
        for position in plan.copied
        for name in graph.outputs(position)
    }
    readers = {position for name in plan.needed for position in plan.readers(name, graph)}
    old_ir.rename_inputs(
        (graph.operators[p] for p in readers), {name: renamed[name] for name in plan.needed}
    )
    at = plan.at
    gradients = _entering_gradients(at, graph)
    for name in _to_hold_back(plan, graph, kept) if gradients else ():
        old_ir.hold_back_before(block, at, name, gradients)
        at += 1
    for position in plan.copied:
        for name in running_statistics(graph.operators[position]):
            old_ir.assign_before(block, at, name, renamed[name])
            at += 1
        is_replayed = graph.mask(position) is not None
        copy = old_ir.dropout_again_before if is_replayed else old_ir.copy_before
        copy(block, at, graph.operators[position], renamed, **{COPY_OF: plan.segment})
        at += 1


def _to_hold_back(plan: Plan, graph: Graph, kept: Kept) -> list[str]:
    """What the copies read that exists earlier; while it is held back, no copy can start."""
    names: dict[str, None] = {}
    waits: set[str] = set()
    for position in plan.copied:
        inputs = graph.inputs(position)
        given = [name for name in inputs if name in kept and graph.is_given(name)]
        names.update((name, None) for name in inputs if name in kept and name not in given)
        if not any(name in names or name in waits for name in inputs):
            # For example the cast of a weight, under mixed precision.
            names.update((name, None) for name in given)
        waits.update(graph.outputs(position))
    return list(names)


def _entering_gradients(at: int, graph: Graph) -> list[str]:
    """Gradients that exist when the backward reaches `at`; none at its start."""
    earlier = [position for position in graph.backward if position < at]
    made = {name for position in earlier for name in graph.outputs(position)}
    entering = [name for name in graph.inputs(at) if name in made]
    return entering or (graph.outputs(earlier[-1])[:1] if earlier else [])
