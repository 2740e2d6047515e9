"""What a run says and notes: rank 0 prints it, and ``events.jsonl`` keeps it for the report."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import numpy as np
import paddle

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute._paddle.version import paddle_version
from paddle_recompute._run_folder import EVENTS
from paddle_recompute._version import __version__
from paddle_recompute.app.config import Config
from paddle_recompute.app.data import PairLoader, PreparedData
from paddle_recompute.app.launch import STARTED, styled
from paddle_recompute.app.report import EventLog
from paddle_recompute.app.trainer.divergence import first_not_finite
from paddle_recompute.app.trainer.loop import Callback, Run
from paddle_recompute.app.trainer.peak_memory import frees_late
from paddle_recompute.distributed import buffers_of, values_of_ranks
from paddle_recompute.grad_sync import CommunicationTrace
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.train_step import StepResult, TrainStep

NOTED_STEP = 3
"""Of a session: the first step learns the order of the gradients, so it sends nothing early."""
MOST_RANKS = 8


class Events(Callback):
    """The console output of a run, and its event log. On other ranks than 0 it is silent.

    Args:
        config: Of the run.
        rank: Of this process.
    """

    def __init__(self, config: Config, rank: int) -> None:
        self._is_main = rank == 0
        self._event_log = EventLog(config.train.output_dir / EVENTS if self._is_main else None)
        self.note, self.open = self._event_log.note, self._event_log.open
        self._exceeded: RecomputePlan | None = None
        self._began = float(os.environ.get(STARTED, time.time()))  # when the launcher was called

    def say(self, *sentences: str, indent: str = "", **style: Any) -> None:
        """Show the user each sentence on a line of its own, in a style of `click.style`."""
        for text in sentences if self._is_main else ():
            print(styled(indent + text, **style), flush=True)
            self.note("said", text=indent + text)

    def on_start(self, run: Run) -> None:
        if run.done < run.total:
            first, every = run.done + 1, run.config.train.log_every
            self.say(
                f"Training: steps {first:,} to {run.total:,}, figures every {every}", bold=True
            )

    def after_step(self, run: Run) -> None:
        assert run.result is not None
        if run.step == run.done + 1:
            self.say(
                f"Step {run.step:,}: loss {run.result.loss:.4f}, "
                f"{time.time() - self._began:.1f} s after the start",
                bold=True,
            )
        if run.step == min(run.done + NOTED_STEP, run.total):
            self._note_times(run, run.result)
        if run.result.skipped:
            written = first_not_finite(buffers_of(run.model))
            self.say(
                f"Step {run.step} is skipped: not finite in float16 with a loss scale of "
                f"{run.result.loss_scale:g} (loss {run.result.loss:g}, gradient norm "
                f"{run.result.grad_norm:g})"
                + (
                    f"; its forward has left the buffer {written} not finite, and it stays so"
                    if written
                    else ""
                )
            )

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        """Warn of a step above the budget: other code may allocate after the plan was measured."""
        plan, peak = run.steps.plan, record["peak_bytes"]
        if plan is None or peak is None or frees_late(run.config) or plan is self._exceeded:
            return
        budget = plan.memory_budget
        if peak > budget:
            self._exceeded = plan
            self.say(
                f"A step up to step {run.step} took {format_bytes(peak)}, more than "
                f"recompute.memory_budget: {format_bytes(budget)}: something beside the step has "
                "taken memory since the plan was measured. If the device does not have so much, "
                f"lower the budget by {format_bytes(peak - budget)}"
            )

    def _note_times(self, run: Run, result: StepResult) -> None:
        """How long each of the first ranks computed, sent and waited in this step.

        The times are there anyway (`GradientSync.timeline`). A step of one process, of a static
        graph or on GPUs, whose streams the host does not see, is not noted.
        """
        step = run.steps.step
        timeline = step.timeline if isinstance(step, TrainStep) else None
        if timeline is None or run.config.launch.device != "cpu":
            return
        own = _times(timeline, result.seconds) if run.rank < MOST_RANKS else None
        ranks = [times for times in values_of_ranks(own, "the times of a step") if times]
        self.note("times", step=run.step, ranks=ranks)


def environment(config: Config) -> dict[str, str]:
    """Versions and machine, without the machine's name."""
    return {
        "paddle_recompute": __version__,
        "paddle": ".".join(map(str, paddle_version())),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "device": str(paddle.device.get_device()),
        "ranks": str(config.world_size),
    }


def data_figures(data: PreparedData, loader: PairLoader) -> dict[str, Any]:
    """Numbers of pairs, lengths of the training texts in tokens, and what is left out."""
    return {
        "train": len(data.train),
        "valid": len(data.valid),
        "pool": len(data.pool),
        "words": data.tokenizer.vocab_size,
        "lengths": loader.lengths(),
        "notes": [*data.notes, *loader.notes()],
    }


def _times(timeline: CommunicationTrace, seconds: dict[str, float]) -> list[float]:
    """Of this rank, in ms: the step, forward and backward, all sums of gradients, these under the
    backward, and the wait behind it.
    """
    end = timeline.backward_ended
    sums = [
        (bucket.started, bucket.ended)
        for bucket in timeline.buckets
        if bucket.started is not None and bucket.ended is not None
    ]
    times = (
        seconds["forward_backward"] + seconds["sync"] + seconds["update"],
        seconds["forward_backward"],
        sum(ended - started for started, ended in sums),
        sum(max(0.0, min(ended, end) - started) for started, ended in sums),
        timeline.ended - end,
    )
    return [round(1e3 * time, 3) for time in times]
