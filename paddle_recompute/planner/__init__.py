"""What to recompute so that a step stays within a budget of bytes, and costs the least time.

`measure_costs` measures a `Job` (model, batch, loss): a real step with all blocks recomputed, and
steps in which one call of each kind is plain. That gives `StepCosts`, plain data. `solve` finds the
fastest choice within a budget. It makes a `RecomputePlan`, which wraps the calls of a model;
`planning` measures a step under it, and plans anew for what was too much.
"""

from paddle_recompute.planner.costs import PLAIN, StepCosts, Timeline, maximum, simulate
from paddle_recompute.planner.extrapolation import extrapolated, probe
from paddle_recompute.planner.find_batch import BatchSize, find_batch_size, largest_that_fits
from paddle_recompute.planner.job import BUCKETS, Job
from paddle_recompute.planner.measured_costs import measure_costs
from paddle_recompute.planner.planning import (
    MemoryEstimate,
    estimate,
    plan,
    plan_of,
    verified,
    within_budget,
)
from paddle_recompute.planner.recompute_plan import RecomputePlan, make_plan
from paddle_recompute.planner.search import (
    choices_of_policy,
    next_faster,
    smallest,
    solve,
    uniform,
)

__all__ = [
    "BUCKETS",
    "PLAIN",
    "BatchSize",
    "Job",
    "MemoryEstimate",
    "RecomputePlan",
    "StepCosts",
    "Timeline",
    "choices_of_policy",
    "estimate",
    "extrapolated",
    "find_batch_size",
    "largest_that_fits",
    "make_plan",
    "maximum",
    "measure_costs",
    "next_faster",
    "plan",
    "plan_of",
    "probe",
    "simulate",
    "smallest",
    "solve",
    "uniform",
    "verified",
    "within_budget",
]
