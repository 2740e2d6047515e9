"""Contrastive training of encoders: the losses and the gradient cache."""

from paddle_recompute.contrastive.gather import agree_on_rows, all_gather_with_grad, gather_rows
from paddle_recompute.contrastive.grad_cache import GradCache
from paddle_recompute.contrastive.loss import ContrastiveLoss, text_ids

__all__ = [
    "ContrastiveLoss",
    "GradCache",
    "agree_on_rows",
    "all_gather_with_grad",
    "gather_rows",
    "text_ids",
]
