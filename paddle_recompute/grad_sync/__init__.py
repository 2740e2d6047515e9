"""Gradient synchronization between data-parallel ranks that recompute does not slow down."""

from paddle_recompute.grad_sync.gradient_sync import GradientSync, SyncMode

__all__ = ["GradientSync", "SyncMode"]
