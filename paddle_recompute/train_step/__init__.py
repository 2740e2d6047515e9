"""One optimizer step: micro-batches, mixed precision, synchronization, clipping, update.

`TrainStep` sends each micro-batch through a `backward` (of a loss, or of a gradient cache), in the
autocast of `mixed_precision`; the last one synchronizes the ranks. Then it looks through the
`parameters`, divides their `gradients` by the loss scale, clips and updates, or leaves the step
out; loss and norm stay on the device until they are read (`pending_metrics`), where that is
possible. `optimizer` makes the optimizer and its schedule, `optimizer_state` names its moments.
`compile_model` runs the model as Programs instead, which `trusted_programs` compares with eager
execution.
"""

from paddle_recompute.train_step.backward import checked_count, fault_of_loss, inputs_of_cache
from paddle_recompute.train_step.compiling import CompileReport, compile_model
from paddle_recompute.train_step.lr_schedule import build_schedule
from paddle_recompute.train_step.mixed_precision import check_device
from paddle_recompute.train_step.optimizer import (
    OptimizerConfig,
    build_optimizer,
    decayed_parameters,
    make_optimizer,
)
from paddle_recompute.train_step.options import check_one_loss
from paddle_recompute.train_step.step import LOSS_PREFIX, NOT_UPDATED, Step, StepResult
from paddle_recompute.train_step.train_step import TrainStep

__all__ = [
    "LOSS_PREFIX",
    "NOT_UPDATED",
    "CompileReport",
    "OptimizerConfig",
    "Step",
    "StepResult",
    "TrainStep",
    "build_optimizer",
    "build_schedule",
    "check_device",
    "check_one_loss",
    "checked_count",
    "compile_model",
    "decayed_parameters",
    "fault_of_loss",
    "inputs_of_cache",
    "make_optimizer",
]
