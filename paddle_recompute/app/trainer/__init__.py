"""The run from configuration to report: data, steps, evaluation, checkpoints, resume.

`Trainer.run` loads the pairs (`setup`), measures the memory of a step and chooses chunks or a plan
(`memory`, `chunk_search`, `budget_plan`), builds the step (`step`), and runs it
(`loop`). What happens around the steps are callbacks: figures (`recorder`, `boards`), evaluations
(`evaluation`), saves (`checkpoints`), and what is said and noted (`events`).
"""

from paddle_recompute.app.trainer.budget_plan import step_seed
from paddle_recompute.app.trainer.loop import Callback, Run, batches_of
from paddle_recompute.app.trainer.memory_report import memory_report
from paddle_recompute.app.trainer.setup import (
    join_ranks,
    seeded_model,
    wrap,
)
from paddle_recompute.app.trainer.step import Chunks, Objective, build_step, check_mode
from paddle_recompute.app.trainer.trainer import Trainer, total_steps

__all__ = [
    "Callback",
    "Chunks",
    "Objective",
    "Run",
    "Trainer",
    "batches_of",
    "build_step",
    "check_mode",
    "join_ranks",
    "memory_report",
    "seeded_model",
    "step_seed",
    "total_steps",
    "wrap",
]
