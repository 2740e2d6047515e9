"""Contrastive training of encoders."""

from paddle_recompute.contrastive.grad_cache import GradCache
from paddle_recompute.contrastive.loss import ContrastiveLoss

__all__ = ["ContrastiveLoss", "GradCache"]
