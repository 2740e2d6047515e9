"""Gradient synchronization of data-parallel ranks, overlapped with the backward."""

from paddle_recompute.grad_sync._agreement import StepReport
from paddle_recompute.grad_sync._pieces import (
    GradientKeeper,
    PieceSender,
    SentPiece,
    keep_elsewhere,
    keeper_of,
)
from paddle_recompute.grad_sync.gradient_sync import GradientSync, SyncMode

__all__ = [
    "GradientKeeper",
    "GradientSync",
    "PieceSender",
    "SentPiece",
    "StepReport",
    "SyncMode",
    "keep_elsewhere",
    "keeper_of",
]
