"""The run from configuration to report: data, steps, evaluation, checkpoints, resume."""

from paddle_recompute.trainer.build import ProgramModel, build_step, check_mode
from paddle_recompute.trainer.objective import Chunks, Objective, positive_ids
from paddle_recompute.trainer.trainer import Trainer, step_seed, total_steps

__all__ = [
    "Chunks",
    "Objective",
    "ProgramModel",
    "Trainer",
    "build_step",
    "check_mode",
    "positive_ids",
    "step_seed",
    "total_steps",
]
