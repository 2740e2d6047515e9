"""What to recompute so that a step stays within a budget of bytes, and costs the least time."""

from paddle_recompute.planner.batch_size import costs_of_batch, extrapolated, probe
from paddle_recompute.planner.costs import PLAIN, WHOLE, StepCosts, maximum
from paddle_recompute.planner.find_batch import BatchSize, find_batch_size
from paddle_recompute.planner.front import next_faster, smallest
from paddle_recompute.planner.job import Job
from paddle_recompute.planner.offloaded import Offloaded, offloaded
from paddle_recompute.planner.planning import (
    MemoryEstimate,
    estimate,
    plan,
    verified,
    within_budget,
)
from paddle_recompute.planner.policies import choices_of_policy, uniform
from paddle_recompute.planner.recompute_plan import MOST_CORRECTIONS, RecomputePlan, make_plan
from paddle_recompute.planner.report import Row, budget_of_card, rows_of, table, write
from paddle_recompute.planner.simulate import JOINED, NESTED, Choice, Timeline, simulate
from paddle_recompute.planner.solve import Solution, solve

__all__ = [
    "JOINED",
    "MOST_CORRECTIONS",
    "NESTED",
    "PLAIN",
    "WHOLE",
    "BatchSize",
    "Choice",
    "Job",
    "MemoryEstimate",
    "Offloaded",
    "RecomputePlan",
    "Row",
    "Solution",
    "StepCosts",
    "Timeline",
    "budget_of_card",
    "choices_of_policy",
    "costs_of_batch",
    "estimate",
    "extrapolated",
    "find_batch_size",
    "make_plan",
    "maximum",
    "next_faster",
    "offloaded",
    "plan",
    "probe",
    "rows_of",
    "simulate",
    "smallest",
    "solve",
    "table",
    "uniform",
    "verified",
    "within_budget",
    "write",
]
