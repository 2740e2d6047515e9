"""`find_batch_size`: the largest micro-batch within a budget; the step keeps its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import paddle

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.distributed import is_distributed, values_of_ranks
from paddle_recompute.errors import PlanError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.planner.batch_size import extrapolated, probe, with_rows
from paddle_recompute.planner.front import smallest
from paddle_recompute.planner.job import Job, LossFn, check_count
from paddle_recompute.planner.planning import bytes_of_budget
from paddle_recompute.planner.planning import verified as verified_plan
from paddle_recompute.planner.recompute_plan import RecomputePlan, infeasible, make_plan
from paddle_recompute.planner.solve import solve
from paddle_recompute.planner.step_costs import Progress


@dataclass(frozen=True)
class BatchSize:
    """A batch that fits.

    Attributes:
        rows: Per rank and micro-batch.
        plan: What is recomputed with it.
        accumulate_steps: Micro-batches of a step, so that the global batch stays what it was.
        fastest_rows: The rows with which an example takes the least time.
        fastest_plan: What is recomputed with those.
    """

    rows: int
    plan: RecomputePlan
    accumulate_steps: int
    fastest_rows: int
    fastest_plan: RecomputePlan

    def __str__(self) -> str:
        def told(rows: int, plan: RecomputePlan) -> str:
            return (
                f"{rows} rows: peak {format_bytes(plan.peak_bytes)}, "
                f"{plan.seconds / rows * 1e3:.2f} ms per row"
            )

        return (
            f"largest batch, {told(self.rows, self.plan)}, in {self.accumulate_steps} "
            f"micro-batches per step; fastest, {told(self.fastest_rows, self.fastest_plan)}"
        )


def find_batch_size(
    model: paddle.nn.Layer,
    sample_batch: Any,
    loss_fn: LossFn,
    *,
    memory_budget: int | str,
    local_batch: int,
    optimizer: paddle.optimizer.Optimizer | None = None,
    sync: GradientSync | None = None,
    checkpoints: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> BatchSize:
    """The largest micro-batch that stays within a budget, with what must be recomputed for it.

    Small batches are measured, larger ones are estimated, and the one that is found is verified by
    a forward and backward. The rows of a step stay `local_batch`: a smaller micro-batch means more
    accumulation, not another optimization. All ranks get the smallest of their results.

    Args:
        model: As in `plan`.
        sample_batch: As in `plan`; its rows are repeated.
        loss_fn: As in `plan`.
        memory_budget: As in `plan`.
        local_batch: Rows of this rank in one optimizer step. A loss that relates the rows of a
            micro-batch to each other (contrastive) is another one in smaller micro-batches: use a
            gradient cache there.
        optimizer: As in `plan`.
        sync: As in `plan`.
        checkpoints: As in `plan`.
        progress: As in `plan`.

    Raises:
        ConfigError: `memory_budget` is no number of bytes, or `local_batch` none of rows.
        PlanError: Not even one row stays within the budget.
    """
    budget = bytes_of_budget(memory_budget)
    check_count("local_batch", local_batch)
    options = {"optimizer": optimizer, "sync": sync, "checkpoints": checkpoints}
    job = Job(model, sample_batch, loss_fn, **options)  # type: ignore[arg-type]
    patterns = None if checkpoints is None else tuple(checkpoints)
    probes = probe(job, progress)
    divisors = [n for n in range(1, local_batch + 1) if local_batch % n == 0]

    def solved(rows: int) -> RecomputePlan | None:
        costs = extrapolated(probes, rows)
        solution = solve(costs, budget)
        if solution is None:
            return None
        return make_plan(costs, budget, signature=job.signature(), checkpoints=patterns)

    fitting = {rows: plan for rows in divisors if (plan := solved(rows)) is not None}
    while fitting:
        rows = smallest_of_ranks(max(fitting))
        verified = _verified(replace(job, batch=with_rows(sample_batch, rows)), fitting[rows])
        if verified is not None:
            fitting[rows] = verified
            fastest = min(fitting, key=lambda n: fitting[n].seconds / n)
            return BatchSize(rows, verified, local_batch // rows, fastest, fitting[fastest])
        fitting = {n: plan for n, plan in fitting.items() if n < rows}
    one_row = extrapolated(probes, 1)
    why = infeasible(one_row, budget, smallest(one_row))
    raise PlanError(f"{why}. This is for a batch of one row")


def _verified(job: Job, plan: RecomputePlan) -> RecomputePlan | None:
    """A plan for the batch of `job` whose step was measured; None if it does not fit."""
    try:
        return verified_plan(job, replace(plan, signature=job.signature()))
    except (PlanError, MemoryError):
        return None


def smallest_of_ranks(rows: int) -> int:
    """The smallest of the ranks' numbers, on all of them."""
    if not is_distributed():
        return rows
    return min(int(n) for n in values_of_ranks(rows, "the rows of a batch"))
