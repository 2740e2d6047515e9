"""The run from configuration to report: data, steps, evaluation, checkpoints, resume."""

from paddle_recompute.app.trainer.build import ProgramModel, build_step, check_mode
from paddle_recompute.app.trainer.loop import Callback, Run, step_seed
from paddle_recompute.app.trainer.memory_report import MemoryReport, memory_report, what_if
from paddle_recompute.app.trainer.objective import Chunks, Objective
from paddle_recompute.app.trainer.trainer import Trainer, total_steps

__all__ = [
    "Callback",
    "Chunks",
    "MemoryReport",
    "Objective",
    "ProgramModel",
    "Run",
    "Trainer",
    "build_step",
    "check_mode",
    "memory_report",
    "step_seed",
    "total_steps",
    "what_if",
]
