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
from paddle_recompute._paddle.static.attributes import COPY_OF
from paddle_recompute.recompute.program.old_ir.graph import OldIrGraph
from paddle_recompute.recompute.program.plan import Plan


def carry_out(plans: Sequence[Plan], graph: OldIrGraph) -> None:
    """Insert the copies of `plans`, and let the backward read them."""
    # The last plan first, so that the positions of the others stay valid.
    for plan in sorted(plans, key=lambda plan: plan.at, reverse=True):
        _carry_out(plan, graph)
    old_ir.finish_changes(graph.program)


def _carry_out(plan: Plan, graph: OldIrGraph) -> None:
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
    held_back = dict.fromkeys(name for names in plan.held_back for name in names)
    for at, name in enumerate(held_back, plan.at):
        old_ir.hold_back_before(block, at, name, list(plan.gradients))
    at = plan.at + len(held_back)
    for position in plan.copied:
        for name in graph.running_statistics(position):
            old_ir.assign_before(block, at, name, renamed[name])
            at += 1
        is_replayed = graph.mask(position) is not None
        copy = old_ir.dropout_again_before if is_replayed else old_ir.copy_before
        copy(block, at, graph.operators[position], renamed, **{COPY_OF: plan.segment})
        at += 1
