"""Says whether the network between the machines is what a step waits for."""

from __future__ import annotations

from collections.abc import Callable

from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer.loop import Callback, Run
from paddle_recompute.distributed import mean_over_ranks
from paddle_recompute.train_step import TrainStep

SHARE = 0.25
"""Of a step: from there on the network counts as the limit."""
_FIRST, _LAST = 2, 10
"""Steps of a session that count. The first one sends nothing during its backward."""


class NetworkLimit(Callback):
    """Measures the first steps of a run on several machines, and says what was found.

    Args:
        say: Shows the user a sentence, on rank 0 only.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._steps = 0
        self._exposed = self._seconds = 0.0

    def after_step(self, run: Run) -> None:
        last = min(run.done + _LAST, run.total)
        if run.config.launch.num_nodes == 1 or not run.done + _FIRST <= run.step <= last:
            return
        step = run.steps.step
        timeline = step.timeline if isinstance(step, TrainStep) else None
        if timeline is None or timeline.exposed is None or run.result is None:
            return
        self._steps += 1
        self._exposed += timeline.exposed
        self._seconds += sum(run.result.seconds.values())
        if run.step == last:
            seconds = mean_over_ranks(self._seconds / self._steps)
            exposed = mean_over_ranks(self._exposed / self._steps)
            num_bytes = sum(bucket.num_bytes for bucket in timeline.buckets)
            if text := network_limit(run.config, seconds, exposed, num_bytes):
                self._say(text)


def network_limit(config: Config, seconds: float, exposed: float, num_bytes: int) -> str:
    """What to say of the network; empty if it is not the limit.

    Args:
        config: Of the run.
        seconds: Of a step.
        exposed: Seconds of them in which gradients are sent and nothing is computed.
        num_bytes: What a rank sends in a step.
    """
    if exposed < SHARE * seconds:
        return ""
    advice = ["a larger contrastive.global_batch has fewer steps"]
    if config.sync.compression == "none":
        advice.insert(0, "sync.compression=bf16 sends half the bytes")
    if config.sync.mode == "fused":
        advice.insert(0, "sync.mode=overlap sends during the backward")
    return (
        f"The network is the limit: a step takes {seconds:.2f} s, and for {exposed:.2f} s of it "
        f"gradients ({format_bytes(num_bytes)}) are sent and nothing is computed; "
        + ", ".join(advice)
    )
