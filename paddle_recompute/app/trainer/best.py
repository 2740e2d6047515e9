"""The best evaluation of a run so far, and early stopping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import FiniteFloat, NonNegativeInt

from paddle_recompute.app.config import Config


@dataclass
class Best:
    """What the evaluations during a run have given.

    Attributes:
        metric: ``train.best_metric``.
        best: Its highest value; None before the first evaluation.
        best_step: The first step that had it.
        since: Evaluations after that one.
    """

    metric: str
    best: FiniteFloat | None = None
    best_step: NonNegativeInt = 0
    since: NonNegativeInt = 0

    def has_ended(self, config: Config) -> bool:
        """Whether ``train.patience`` ends the run."""
        patience = config.train.patience
        return patience is not None and self.since >= patience

    def add(self, step: int, value: float) -> bool:
        """Add an evaluation; returns whether it is the best one."""
        if self.best is None or value > self.best:
            self.best, self.best_step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    def figures(self, config: Config) -> dict[str, Any]:
        """What the final record says of it; nothing without ``train.eval_every``."""
        if self.best is None:
            return {}
        return {
            f"best_{self.metric}": self.best,
            "best_step": self.best_step,
            "stopped_early": self.has_ended(config),
        }
