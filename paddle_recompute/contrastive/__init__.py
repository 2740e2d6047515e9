"""Contrastive training of encoders."""

from paddle_recompute.contrastive.loss import ContrastiveLoss

__all__ = ["ContrastiveLoss"]
