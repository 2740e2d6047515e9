"""`find_batch_size`: the largest micro-batch within a budget; the step keeps its rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import paddle

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.distributed import is_distributed, reduce_numbers
from paddle_recompute.errors import PlanError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.planner.extrapolation import extrapolated, probe, with_rows
from paddle_recompute.planner.job import Job, LossFn, check_count
from paddle_recompute.planner.measured_costs import Progress
from paddle_recompute.planner.planning import bytes_of_budget, plan_of
from paddle_recompute.planner.planning import verified as verified_plan
from paddle_recompute.planner.recompute_plan import RecomputePlan, infeasible
from paddle_recompute.planner.search import smallest, solve


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
    probes = probe(job, progress)
    divisors = [n for n in range(1, local_batch + 1) if local_batch % n == 0]

    @functools.cache
    def planned(rows: int) -> RecomputePlan | None:
        costs = extrapolated(probes, rows)
        if solve(costs, budget) is None:
            return None
        return plan_of(job, costs, budget)

    def fits(count: int) -> bool:
        return count <= len(divisors) and planned(divisors[count - 1]) is not None

    def largest() -> int:
        count = largest_that_fits(fits, len(divisors))
        return divisors[count - 1] if count is not None else 0

    while rows := smallest_of_ranks(largest()):
        divisors = [n for n in divisors if n < rows]
        plan = planned(rows)
        batch = with_rows(sample_batch, rows)
        verified = plan and _verified(replace(job, batch=batch), plan)
        if smallest_of_ranks(bool(verified)):
            assert verified
            plans = {rows: verified} | {n: plan for n in divisors if (plan := planned(n))}
            fastest = smallest_of_ranks(min(plans, key=lambda n: plans[n].seconds / n))
            return BatchSize(rows, verified, local_batch // rows, fastest, plans[fastest])
    if planned(1) is not None:
        raise PlanError(
            "not even a batch of one row stays within the budget: its measured step did not, or "
            "another rank needs more, whose error says how much"
        )
    one_row = extrapolated(probes, 1)
    why = infeasible(one_row, budget, smallest(one_row))
    raise PlanError(f"{why}. This is for a batch of one row")


def largest_that_fits(
    fits: Callable[[int], bool], most: int, *, least: int = 1, close: int | None = None
) -> int | None:
    """The largest whole number from `least` to `most` that fits, if all below it do too.

    Numbers are doubled until they do not fit, so that little more than the largest is tried.

    Args:
        fits: Whether a number fits.
        most: The largest that is tried.
        least: The first that is tried.
        close: The result may be too small by its ``1 / close``; None: it is exact.

    Returns:
        None: not even `least` fits.
    """
    if not fits(least):
        return None
    low, high = least, 2 * least
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // close if close else 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


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
    return int(reduce_numbers([rows], "min", "the rows of a batch")[0])
