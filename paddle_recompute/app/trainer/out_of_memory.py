"""A step that ran out of memory: why the run ends, and the smaller plan that it goes on with.

A single process drops the gradients, makes the smaller plan and repeats the batch: the parameters
were not updated, so the losses are those of a run that had the plan from the start, to the bit. Of
several ranks none goes on after another has failed; the smaller plan is written beside the
checkpoints, and the next start of the run takes it.
"""

from __future__ import annotations

import gc

import paddle

from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.planned import check_agreed
from paddle_recompute.app.trainer.run_checkpoints import write_smaller_plan
from paddle_recompute.distributed import is_distributed
from paddle_recompute.errors import ConfigError, OutOfMemoryError
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.train_step import Step

RESERVED_AGAIN = 0.05
"""Part of the budget that is reserved more after a step ran out of memory."""


def planned_again(
    config: Config, plan: RecomputePlan | None, step: Step, error: MemoryError, number: int
) -> RecomputePlan:
    """The plan with which a single process repeats step `number`, which ran out of memory.

    Raises:
        OutOfMemoryError: There are several ranks; the plan is written for their next start.
        ConfigError: The run does not plan again, or the parameters are half updated.
        PlanError: Nothing stays within the budget with 5 % less.
    """
    if plan is None or config.train.on_oom != "replan":
        held = _memory.format_bytes(_memory.current_bytes()) if _memory.is_counted() else "?"
        advice = (
            "set train.on_oom: replan, or lower recompute.memory_budget"
            if plan is not None
            else "set recompute.policy: budget with recompute.memory_budget at what the device has "
            f"to give (Paddle holds {held} now), which finds what must be recomputed"
        )
        raise ConfigError(f"step {number} ran out of memory ({error}); {advice}") from error
    if not is_distributed() and getattr(step, "is_updating", False):
        raise ConfigError(
            f"step {number} ran out of memory in the optimizer's update, so the parameters are "
            "half updated: continue from the last checkpoint with train.resume=true and a lower "
            "recompute.memory_budget"
        ) from error
    smaller = plan.recalibrated(max(1, int(RESERVED_AGAIN * plan.memory_budget)))
    if is_distributed():
        path = write_smaller_plan(config, smaller)
        raise OutOfMemoryError(
            f"step {number} ran out of memory ({error}). A smaller plan is in {path}: start the "
            "run again with train.resume=auto (--max-restart does), and it goes on with that plan"
        ) from error
    return smaller


def apply_again(plan: RecomputePlan, model: paddle.nn.Layer) -> None:
    """Drop what a step that failed has left (gradients, graphs that errors held); wrap anew."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.clear_gradient(False)
    gc.collect()
    check_agreed(plan)
    plan.remove(model)
    plan.apply(model)
