"""Contrastive training of encoders: the losses and the gradient cache."""

from paddle_recompute.contrastive._chunks import num_rows_of
from paddle_recompute.contrastive._own_backward import OwnBackward
from paddle_recompute.contrastive.gather import agree_on_rows, all_gather_with_grad, gather_rows
from paddle_recompute.contrastive.grad_cache import GradCache
from paddle_recompute.contrastive.loss import ContrastiveLoss, text_ids

__all__ = [
    "ContrastiveLoss",
    "GradCache",
    "OwnBackward",
    "agree_on_rows",
    "all_gather_with_grad",
    "gather_rows",
    "num_rows_of",
    "text_ids",
]
