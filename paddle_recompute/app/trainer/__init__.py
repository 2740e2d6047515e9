"""The run from configuration to report: data, steps, evaluation, checkpoints, resume.

`Trainer.run` loads the pairs (`setup`), measures the memory of a step and chooses chunks or a plan
(`peak_memory`, `chunk_search`, `budget_plan`), builds the step (`step`), restores it from a
checkpoint (`resume`), and runs it (`loop`). Callbacks run around the steps: figures (`recorder`,
`boards`), evaluations (`evaluation`), saves (`checkpoints`), console output and event log
(`events`).
"""

from paddle_recompute.app.trainer.budget_plan import step_seed
from paddle_recompute.app.trainer.loop import Callback, Run, batches_of, total_steps
from paddle_recompute.app.trainer.memory_report import memory_report
from paddle_recompute.app.trainer.setup import (
    check_model,
    join_ranks,
    recompute_alone,
    seeded_model,
    wrap,
)
from paddle_recompute.app.trainer.step import Chunks, Objective, build_step, check_mode
from paddle_recompute.app.trainer.trainer import Trainer

__all__ = [
    "Callback",
    "Chunks",
    "Objective",
    "Run",
    "Trainer",
    "batches_of",
    "build_step",
    "check_mode",
    "check_model",
    "join_ranks",
    "memory_report",
    "recompute_alone",
    "seeded_model",
    "step_seed",
    "total_steps",
    "wrap",
]
