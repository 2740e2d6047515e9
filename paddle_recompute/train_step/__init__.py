"""One optimizer step: micro-batches, mixed precision, synchronization, clipping, update."""

from paddle_recompute.train_step.backward import inputs_of_cache
from paddle_recompute.train_step.compiling import CompileReport, compile_model
from paddle_recompute.train_step.mixed_precision import check_device
from paddle_recompute.train_step.optimizer import (
    OptimizerConfig,
    build_optimizer,
    build_schedule,
    decayed_parameters,
    make_optimizer,
)
from paddle_recompute.train_step.step import NOT_UPDATED, OF_LOSS, Step, StepResult
from paddle_recompute.train_step.train_step import TrainStep

__all__ = [
    "NOT_UPDATED",
    "OF_LOSS",
    "CompileReport",
    "OptimizerConfig",
    "Step",
    "StepResult",
    "TrainStep",
    "build_optimizer",
    "build_schedule",
    "check_device",
    "compile_model",
    "decayed_parameters",
    "inputs_of_cache",
    "make_optimizer",
]
