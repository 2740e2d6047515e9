"""The loop over the epochs and steps of a run, and the callbacks around it.

`train` runs the steps; a `Callback` shows, writes and saves. Every rank calls every method of every
callback, in the same order, so a callback may use collectives. The metrics are the same numbers on
all ranks, so the ranks agree on the best evaluation (`Best`) without asking each other.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import paddle
from paddle.optimizer.lr import LRScheduler

from paddle_recompute.app.config import Config
from paddle_recompute.app.data import PairLoader, Position, PreparedData
from paddle_recompute.app.trainer.best import Best
from paddle_recompute.app.trainer.budget_plan import PlannedSteps
from paddle_recompute.app.trainer.divergence import explained
from paddle_recompute.app.trainer.meter import Meter
from paddle_recompute.app.trainer.peak_memory import largest_of_ranks
from paddle_recompute.app.trainer.step import Batch, Objective
from paddle_recompute.distributed import StopRequest, barrier, mean_over_ranks
from paddle_recompute.errors import DivergenceError, StoppedError
from paddle_recompute.train_step import StepResult


class Callback:
    """What happens around the steps of a run; override what you need.

    Examples:
        >>> class Notice(Callback):
        ...     def on_log(self, run: Run, record: dict[str, Any]) -> None:
        ...         print(record["step"], record["loss"])
    """

    def on_start(self, run: Run) -> None:
        """Before the first step; what a checkpoint holds is restored."""

    def after_step(self, run: Run) -> None:
        """After the update of ``run.step``; reading ``run.result`` waits for the device."""

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        """A line of ``metrics.jsonl`` was made: ``loss``, ``lr``, ``grad_norm``, ..."""

    def on_save(self, run: Run) -> None:
        """The state after ``run.step`` is to be saved."""

    def on_end(self, run: Run) -> None:
        """After the last step; also after an error."""


@dataclass
class Run:
    """A run of the trainer, as callbacks see it.

    Attributes:
        config: The configuration.
        rank: Of this process.
        total: Optimizer steps of the whole run.
        done: Steps of earlier sessions.
        data: The pairs and the tokenizer.
        model: The encoder.
        objective: The loss.
        steps: Makes the steps; ``steps.step`` is the `TrainStep` or `StaticTrainStep`.
        schedule: The learning rate of the next step.
        untrained: The metrics before training.
        best: The evaluations so far.
        position: How far the steps so far have come in the pairs.
        figures: Of the steps up to the last save: ``loss``, ``peak_bytes``,
            ``examples_per_second``.
        step: The last step, counted from 1; `done` before the first.
        epoch: Its epoch, counted from 0.
        result: What the last step returned.
        rate: Its learning rate.
        stops: A signal reached a rank: the run ends after this step.
        valid: The metrics of an evaluation after this step; None: there was none.
        ended: The evaluations end the run after this step.
    """

    config: Config
    rank: int
    total: int
    done: int
    data: PreparedData
    model: paddle.nn.Layer
    objective: Objective
    steps: PlannedSteps
    schedule: LRScheduler
    untrained: dict[str, Any]
    best: Best
    position: Position
    figures: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    epoch: int = 0
    result: StepResult | None = None
    rate: float = 0.0
    stops: bool = False
    valid: dict[str, float] | None = None
    ended: bool = False
    _session: Meter = field(default_factory=Meter)
    _window: Meter = field(default_factory=Meter)

    @property
    def folder(self) -> Path:
        """``train.output_dir``."""
        return self.config.train.output_dir

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.rank == 0

    @property
    def logs(self) -> bool:
        """Whether the figures of this step are logged."""
        return self._is_due(self.config.train.log_every) or self.evaluates or self.stops

    @property
    def saves(self) -> bool:
        """Whether the state after this step is saved."""
        return self._is_due(self.config.train.save_every) or self.ended or self.stops

    @property
    def evaluates(self) -> bool:
        """Whether the model is evaluated after this step."""
        every = self.config.train.eval_every
        return every is not None and self._is_due(every)

    def _is_due(self, every: int | None) -> bool:
        return self.step == self.total or self.step % (every or self.total) == 0

    def run_step(self, step: int, epoch: int, micro_batches: list[Batch]) -> None:
        """One optimizer step.

        Raises:
            DivergenceError: The loss or the gradient is not finite.
        """
        self.step, self.epoch = step, epoch
        try:
            self.result = self.steps(micro_batches, step)
            if self.logs or self.saves or step == self.done + 1:
                self.result.loss  # noqa: B018  waits for the device: the time is that of steps
        except DivergenceError as error:
            raise explained(error, step - error.steps_ago, self.model) from error
        self.rate = float(self.schedule())
        self.schedule.step()
        for meter in (self._session, self._window):
            meter.stop()

    def timed(
        self, batches: Iterator[tuple[int, int, list[Batch]]]
    ) -> Iterator[tuple[int, int, list[Batch]]]:
        """`batches`; reading one is part of the time of its step."""
        while True:
            for meter in (self._session, self._window):
                meter.start()
            batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def record(self) -> dict[str, Any]:
        """The figures of the steps since the last record. Every rank calls this."""
        assert self.result is not None
        record: dict[str, Any] = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": _finite(self.result.loss),
            "lr": self.rate,
            "grad_norm": _finite(self.result.grad_norm),
            "examples_per_second": self._window.rate(self.config.contrastive.global_batch),
            "peak_bytes": largest_of_ranks(self._window.peak_bytes),
        }
        if self.result.loss_scale is not None:
            record["loss_scale"] = self.result.loss_scale
            record["skipped_steps"] = self.steps.step.num_skipped
        if self.valid is not None:
            record["valid"] = self.valid
        if self.config.contrastive.learnable_temperature:
            self.steps.step.write_back()
            record["temperature"] = self.objective.loss.temperature
        self._window = Meter()
        return record

    def count(self) -> None:
        """Make `figures` those of all steps of this session. Every rank calls this."""
        rate = self._session.rate(self.config.contrastive.global_batch)
        self.figures |= {
            "loss": _finite(self.result.loss) if self.result is not None else None,
            "peak_bytes": largest_of_ranks(self._session.peak_bytes),
            "examples_per_second": mean_over_ranks(rate),
        }


def train(
    run: Run, batches: Iterator[tuple[int, int, list[Batch]]], callbacks: Sequence[Callback]
) -> None:
    """Run the steps that are left.

    Args:
        run: The run; its fields follow the steps.
        batches: (step, epoch, micro-batches) of each step.
        callbacks: Called in this order.

    Raises:
        DivergenceError: The loss or the gradient is not finite.
        StoppedError: SIGTERM or SIGINT reached a rank; the step is complete and saved.
    """

    def tell(what: Callable[..., None], *more: Any) -> None:
        for callback in callbacks:
            getattr(callback, what.__name__)(run, *more)

    run.step = run.done
    tell(Callback.on_start)
    try:
        with StopRequest() as stop:
            for step, epoch, micro_batches in run.timed(batches):
                run.run_step(step, epoch, micro_batches)
                tell(Callback.after_step)
                run.stops = run.step < run.total and stop.is_due()
                if run.logs:
                    tell(Callback.on_log, run.record())
                if run.saves:
                    run.count()
                    tell(Callback.on_save)
                if run.stops or run.ended:
                    break
            if run.stops or (run.done < run.total and stop.is_due_at_end()):
                _stop(run, stop.signal_number)
    finally:
        tell(Callback.on_end)


def _stop(run: Run, signal_number: int | None) -> NoReturn:
    """Say how to go on, and end this rank, as all others do now."""
    assert signal_number is not None
    barrier()
    name = signal.Signals(signal_number).name
    text = f"Stopped by {name}; the steps so far are saved in {run.folder / 'checkpoint'}. "
    text += "The same command with train.resume=auto goes on"
    if run.is_main:
        print(text, flush=True)
    raise StoppedError(text, 128 + signal_number)


def batches_of(
    config: Config, loader: PairLoader, done: int, total: int, position: Position | None = None
) -> Iterator[tuple[int, int, list[Batch]]]:
    """(step, epoch, micro-batches) of the steps after `done` up to `total`; steps count from 1.

    A step's pairs are the same whatever the number of micro-batches they are cut into. `position`
    follows the steps; None: every step so far was one of this batch.
    """
    rows, size = config.micro_batch, config.contrastive.global_batch
    position = position or loader.position_after(done, size)
    while done < total:
        loader.go_to(position)
        for batch in loader:
            done += 1
            position.take(size)
            del batch["index"]
            yield (
                done,
                position.epoch,
                [
                    {name: part[first : first + rows] for name, part in batch.items()}
                    for first in range(0, config.local_batch, rows)
                ],
            )
            if done == total:
                return
        position.epoch, position.taken = position.epoch + 1, []


def total_steps(config: Config, steps_per_epoch: int, other: int = 0) -> int:
    """Optimizer steps of the whole run: ``max_steps`` or ``num_epochs``, whichever ends first.

    `other`: how many more steps the epochs have, because some were made with other batches.
    """
    by_epochs = config.train.num_epochs and config.train.num_epochs * steps_per_epoch + other
    return min(limit for limit in (config.train.max_steps, by_epochs) if limit is not None)


def _finite(value: float) -> float | None:
    """The number; None if it is not finite, because JSON has no such number."""
    return value if math.isfinite(value) else None
