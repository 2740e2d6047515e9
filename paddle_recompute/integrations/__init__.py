"""Mixins for the trainers of PaddleNLP and PaddleFormers.

Neither library is imported here: a mixin is put before the user's own ``Trainer``.
"""

from paddle_recompute.integrations.contrastive import ContrastiveTrainerMixin
from paddle_recompute.integrations.trainer import RecomputeTrainerMixin

__all__ = ["ContrastiveTrainerMixin", "RecomputeTrainerMixin"]
