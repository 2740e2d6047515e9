"""Evaluation during training: the best checkpoint, and when to stop.

The metrics are the same numbers on all ranks, so the ranks agree without asking each other. What is
known so far is saved in each checkpoint: a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.loop import Callback, Run
from paddle_recompute.checkpoint import Checkpoint
from paddle_recompute.errors import CheckpointError


@dataclass
class Validation:
    """What the evaluations of a run have given.

    Attributes:
        metric: ``train.best_metric``.
        best: Its highest value; None before the first evaluation.
        best_step: The first step that had it.
        since: Evaluations after that one.
    """

    metric: str
    best: float | None = None
    best_step: int = 0
    since: int = 0

    @classmethod
    def of(cls, config: Config, checkpoint: Checkpoint | None) -> Validation:
        """That of `checkpoint`; a new one if there is none, or it was of another metric.

        Raises:
            CheckpointError: The checkpoint has something else.
        """
        metric = config.train.best_metric
        saved = checkpoint.state.get("validation") if checkpoint is not None else None
        if checkpoint is None or saved is None or saved.get("metric") != metric:
            return cls(metric)
        best, steps = saved.get("best"), [saved.get("best_step"), saved.get("since")]
        sound = best is None or (type(best) is float and math.isfinite(best))
        if not sound or any(type(one) is not int or one < 0 for one in steps):
            raise CheckpointError(
                f"{checkpoint.folder / 'state.json'}: is damaged (validation is not what a run "
                "writes there)"
            )
        return cls(metric, best, *steps)

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

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


class Validate(Callback):
    """Evaluates every ``train.eval_every`` steps; saves the best, and ends the run.

    Args:
        validation: Of the run; it is changed.
        evaluate: Returns the metrics; all ranks call it together.
        save: Saves the best checkpoint; likewise.
        say: Shows the user a sentence, on rank 0 only.
    """

    def __init__(
        self,
        validation: Validation,
        evaluate: Callable[[], dict[str, float]],
        save: Callable[[Run], None],
        say: Callable[[str], None],
    ) -> None:
        self._validation, self._evaluate, self._save = validation, evaluate, save
        self._say = say

    def after_step(self, run: Run) -> None:
        run.valid = None
        if not run.evaluates:
            return
        run.steps.step.write_back()
        run.valid = self._evaluate()
        now = self._validation
        if now.add(run.step, run.valid[now.metric]):
            self._save(run)
        elif now.has_ended(run.config):
            run.ended = True
            self._say(
                f"Step {run.step} ends the run: {now.metric} was not above {now.best:.4f} of step "
                f"{now.best_step} in {now.since} evaluations (train.patience)"
            )
