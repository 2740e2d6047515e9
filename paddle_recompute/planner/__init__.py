"""What to recompute so that a step stays within a budget of bytes, and costs the least time."""

from paddle_recompute.planner.batch_size import costs_of_batch
from paddle_recompute.planner.costs import PLAIN, WHOLE, StepCosts
from paddle_recompute.planner.job import Job
from paddle_recompute.planner.planning import MemoryEstimate, estimate, plan
from paddle_recompute.planner.recompute_plan import RecomputePlan
from paddle_recompute.planner.simulate import JOINED, NESTED, Choice, Timeline, simulate
from paddle_recompute.planner.solve import Solution, smallest, solve

__all__ = [
    "JOINED",
    "NESTED",
    "PLAIN",
    "WHOLE",
    "Choice",
    "Job",
    "MemoryEstimate",
    "RecomputePlan",
    "Solution",
    "StepCosts",
    "Timeline",
    "costs_of_batch",
    "estimate",
    "plan",
    "simulate",
    "smallest",
    "solve",
]
