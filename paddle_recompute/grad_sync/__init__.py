"""Gradient synchronization between data-parallel ranks, and what the ranks must agree on first."""

from paddle_recompute.grad_sync.gradient_sync import GradientSync
from paddle_recompute.grad_sync.ranks import barrier, broadcast_from_rank0, mean_over_ranks

__all__ = ["GradientSync", "barrier", "broadcast_from_rank0", "mean_over_ranks"]
