"""The run from configuration to report: data, steps, evaluation, checkpoints, resume."""

from paddle_recompute.trainer.build import build_training, check_mode
from paddle_recompute.trainer.objective import Chunks, Objective
from paddle_recompute.trainer.trainer import Trainer, step_seed, total_steps

__all__ = [
    "Chunks",
    "Objective",
    "Trainer",
    "build_training",
    "check_mode",
    "step_seed",
    "total_steps",
]
