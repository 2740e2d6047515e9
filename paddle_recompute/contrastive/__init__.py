"""Contrastive training of encoders."""

from paddle_recompute.contrastive.gather import all_gather_with_grad
from paddle_recompute.contrastive.grad_cache import GradCache
from paddle_recompute.contrastive.loss import ContrastiveLoss, text_ids

__all__ = ["ContrastiveLoss", "GradCache", "all_gather_with_grad", "text_ids"]
