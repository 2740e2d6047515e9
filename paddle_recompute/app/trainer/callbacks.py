"""The trainer's own callbacks: progress, metrics, notices, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle_recompute._run_folder import METRICS
from paddle_recompute.app.data import PreparedData
from paddle_recompute.app.trainer.loop import Callback, Run
from paddle_recompute.app.trainer.metrics import MetricsLog, Progress
from paddle_recompute.app.trainer.run_checkpoints import RunCheckpoints
from paddle_recompute.app.trainer.validation import Validation


class ShowProgress(Callback):
    """A bar on a terminal, plain lines elsewhere; rank 0 shows it."""

    def on_start(self, run: Run) -> None:
        self._progress = Progress(run.total, done=run.done, enabled=run.is_main)

    def after_step(self, run: Run) -> None:
        self._progress.advance()

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        assert run.result is not None
        self._progress.show({**record, "loss": run.result.loss})

    def on_end(self, run: Run) -> None:
        self._progress.close()


class SaySkippedSteps(Callback):
    """Says which steps were skipped because they overflowed in float16."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def after_step(self, run: Run) -> None:
        result = run.result
        if result is not None and result.skipped:
            self._say(
                f"Step {run.step} is skipped: not finite in float16 with a loss scale of "
                f"{result.loss_scale:g} (loss {result.loss:g}, gradient norm {result.grad_norm:g})"
            )


class WriteMetrics(Callback):
    """Rank 0 writes ``metrics.jsonl``."""

    def on_start(self, run: Run) -> None:
        self._log = MetricsLog(run.folder / METRICS, resumed_at=run.done) if run.is_main else None

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(record)


class SaveCheckpoints(Callback):
    """Saves what a run needs to go on, with the bits of an uninterrupted one.

    Args:
        checkpoints: Of the run.
        data: Their digests and the tokenizer are saved.
        untrained: The metrics before training.
        validation: The evaluations so far.
    """

    def __init__(
        self,
        checkpoints: RunCheckpoints,
        data: PreparedData,
        untrained: dict[str, float],
        validation: Validation,
    ) -> None:
        self._checkpoints, self._data, self._untrained = checkpoints, data, untrained
        self._validation = validation

    def on_save(self, run: Run) -> None:
        self.save(run)

    def save(self, run: Run, *, best: bool = False) -> None:
        """Save the state after ``run.step``, with `best` as the best one."""
        run.steps.step.write_back()
        plan = run.steps.plan
        self._checkpoints.save(
            run.step,
            run.model,
            run.objective.loss,
            run.steps.step,
            save_tokenizer=self._data.tokenizer.save,
            about={
                "data": {name: of.sha256 for name, of in self._data.sources.items()},
                "untrained": self._untrained,
                "chunks": run.objective.chunks.to_dict(),
                "plan": plan.to_dict() if plan is not None else None,
                "figures": run.figures,
                "validation": self._validation.to_dict(),
            },
            best=best,
        )
