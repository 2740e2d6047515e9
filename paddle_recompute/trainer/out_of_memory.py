"""A step that ran out of memory, on one rank or more: why the run ends, or another plan.

A rank that runs out of memory tells the others, who may wait for its gradients. All ranks end the
step, drop its gradients, meet, reserve the same bytes more, and repeat the batch with the same
plan. The parameters were not updated, so the losses are those of a run that had the plan from the
start, to the bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import paddle
import paddle.distributed as dist

from paddle_recompute._paddle import memory as _memory
from paddle_recompute.config import Config
from paddle_recompute.distributed import is_distributed, values_of_ranks
from paddle_recompute.errors import ConfigError, PeerError, SyncError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.train_step import Step, TrainStep
from paddle_recompute.trainer.planned import check_agreed

MOST_MEETINGS = 4
"""Tries to meet: a rank that waits in a collective of the forward is told by the first one."""


def check_can_replan(config: Config) -> None:
    """Check that a step which runs out of memory on one rank can end on the others.

    Raises:
        ConfigError: They might wait for it on a device, in a gather that nothing interrupts.
    """
    is_global = config.contrastive.negatives == "global"
    if config.train.on_oom != "replan" or not is_global or not is_distributed():
        return
    backend = str(dist.get_backend())
    if backend.lower() != "gloo":
        raise ConfigError(
            f"train.on_oom: replan needs contrastive.negatives: local on several ranks with "
            f"{backend}; with global, ranks may wait on their devices for the vectors of the one "
            "that ran out of memory"
        )


def tell_others(step: Step, error: BaseException) -> None:
    """Let no other rank wait for what this one will not send in this step."""
    if isinstance(step, TrainStep):
        step.give_up(error)


def check_is_of_memory(error: BaseException, number: int) -> None:
    """Check that step `number` failed because a rank ran out of memory; all ranks meet here.

    Raises:
        ConfigError: Some ranks have updated their parameters in this step already.
        Exception: `error`, if no rank ran out of memory or the ranks cannot meet.
    """
    own = {"step": number, "memory": isinstance(error, MemoryError)}
    if not is_distributed():
        said = [own]
    else:
        for _ in range(MOST_MEETINGS):
            try:
                said = values_of_ranks(own, "whether a rank ran out of memory")
                break
            except PeerError:  # one has died
                raise error from None
            except SyncError:  # another one is in a collective, and has been told now
                continue
        else:
            raise error
    if not any(one["memory"] for one in said):
        raise error
    steps = {one["step"] for one in said}
    if len(steps) > 1:
        raise ConfigError(
            f"a rank ran out of memory in step {min(steps)} after other ranks had updated their "
            "parameters: continue from the last checkpoint with train.resume=true and a lower "
            "recompute.memory_budget"
        ) from error


RESERVED_AGAIN = 0.05
"""Part of the budget that is reserved more after a step ran out of memory."""


def planned_again(
    config: Config, plan: RecomputePlan | None, step: Step, error: BaseException, number: int
) -> RecomputePlan:
    """The plan with which step `number`, which ran out of memory, is repeated.

    Raises:
        ConfigError: The run does not plan again, or the parameters are half updated.
        PlanError: Nothing stays within the budget with 5 % less.
    """
    if getattr(step, "is_updating", False):
        raise ConfigError(
            f"step {number} ran out of memory in the optimizer's update, so the parameters are "
            "half updated: continue from the last checkpoint with train.resume=true and a lower "
            "recompute.memory_budget"
        ) from error
    if plan is None or config.train.on_oom != "replan":
        held = _memory.format_bytes(_memory.current_bytes()) if _memory.is_counted() else "?"
        advice = (
            "set train.on_oom: replan, or lower recompute.memory_budget"
            if plan is not None
            else "set recompute.policy: budget with recompute.memory_budget at what the device has "
            f"to give (Paddle holds {held} now), which finds what must be recomputed"
        )
        raise ConfigError(f"step {number} ran out of memory ({error}); {advice}") from error
    return plan.recalibrated(max(1, int(RESERVED_AGAIN * plan.memory_budget)))


def apply_again(
    plan: RecomputePlan,
    model: paddle.nn.Layer,
    step: Step,
    synchronization: Callable[[], GradientSync],
) -> None:
    """Drop what a step that failed has left (gradients, graphs that errors held); wrap anew."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.clear_gradient(False)
    gc.collect()
    check_agreed(plan)
    plan.remove(model)
    plan.apply(model)
    if is_distributed() and isinstance(step, TrainStep):
        step.renew_sync(synchronization)
