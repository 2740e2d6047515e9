"""What to recompute so that a step stays within a budget of bytes, and costs the least time.

A `Job` (model, batch, loss) is measured (`step_costs`): `skeleton` runs its step without the
insides of its blocks, `measured_call` each kind of call alone, under each option. Together they are
`StepCosts`, plain data. `simulate` tells from them the bytes and seconds of a step under choices,
event by event; `solve` finds the fastest choices within a budget. They make a `RecomputePlan`,
which treats the calls of a model; `planning` measures a step under it, and plans anew for what was
too much.
"""

from paddle_recompute.planner.batch_size import extrapolated, probe
from paddle_recompute.planner.costs import PLAIN, WHOLE, StepCosts, maximum
from paddle_recompute.planner.find_batch import BatchSize, find_batch_size, largest_that_fits
from paddle_recompute.planner.job import Job
from paddle_recompute.planner.planning import (
    MemoryEstimate,
    estimate,
    plan,
    verified,
    within_budget,
)
from paddle_recompute.planner.policies import choices_of_policy, uniform
from paddle_recompute.planner.recompute_plan import RecomputePlan, make_plan
from paddle_recompute.planner.simulate import JOINED, Choice, Timeline, simulate
from paddle_recompute.planner.solve import Solution, next_faster, smallest, solve
from paddle_recompute.planner.stages import BUCKETS, Stage, offloaded, spread, stages

__all__ = [
    "BUCKETS",
    "JOINED",
    "PLAIN",
    "WHOLE",
    "BatchSize",
    "Choice",
    "Job",
    "MemoryEstimate",
    "RecomputePlan",
    "Solution",
    "Stage",
    "StepCosts",
    "Timeline",
    "choices_of_policy",
    "estimate",
    "extrapolated",
    "find_batch_size",
    "largest_that_fits",
    "make_plan",
    "maximum",
    "next_faster",
    "offloaded",
    "plan",
    "probe",
    "simulate",
    "smallest",
    "solve",
    "spread",
    "stages",
    "uniform",
    "verified",
    "within_budget",
]
