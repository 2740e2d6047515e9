"""What each rank did in one step of a run, for its report: compute, send, wait."""

from __future__ import annotations

from typing import Any

from paddle_recompute.app.report import Journal
from paddle_recompute.app.trainer.loop import Callback, Run
from paddle_recompute.distributed import values_of_ranks
from paddle_recompute.grad_sync import Timeline
from paddle_recompute.train_step import TrainStep

RECORDED_STEP = 3
"""Of a session: the first step learns the order of the gradients, so it sends nothing early."""
MOST_RANKS = 8


class RecordLanes(Callback):
    """Rank 0 notes one step of the session, of the first ranks.

    The times are there anyway (`GradientSync.timeline`). A step of one process, of a static graph
    or on GPUs, whose streams the host does not see, is not noted.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def after_step(self, run: Run) -> None:
        if run.step != min(run.done + RECORDED_STEP, run.total):
            return
        step, result = run.steps.step, run.result
        timeline = step.timeline if isinstance(step, TrainStep) else None
        if timeline is None or result is None or run.config.launch.device != "cpu":
            return
        own = _lane(timeline, result.seconds) if run.rank < MOST_RANKS else None
        lanes = [lane for lane in values_of_ranks(own, "the times of a step") if lane]
        if run.config.launch.num_nodes > 1:  # clocks differ; the last sum reaches all ranks at once
            lanes = [_moved(lane, lane["arrived"]) for lane in lanes]
        first = min(lane["began"] for lane in lanes)
        self._journal.note("lanes", step=run.step, ranks=[_moved(lane, first) for lane in lanes])


def _lane(timeline: Timeline, seconds: dict[str, float]) -> dict[str, Any]:
    """Times of this rank in ms; of each bucket: bytes, queued, started, ended."""
    ended = timeline.backward_ended
    updated = ended + seconds["sync"] + seconds["update"]
    sent = [one for one in timeline.buckets if one.started is not None and one.ended is not None]
    times = {
        "began": ended - seconds["forward_backward"],
        "backward_ended": ended,
        "arrived": max((one.ended for one in sent if one.ended), default=timeline.ended),
        "synchronized": timeline.ended,
        "ended": updated,
    }
    return {name: 1e3 * value for name, value in times.items()} | {
        "buckets": [
            [one.num_bytes, *(1e3 * at for at in (one.queued, one.started, one.ended) if at)]
            for one in sent
        ]
    }


def _moved(lane: dict[str, Any], origin: float) -> dict[str, Any]:
    moved = {name: round(at - origin, 3) for name, at in lane.items() if name != "buckets"}
    buckets = [[size, *(round(at - origin, 3) for at in times)] for size, *times in lane["buckets"]]
    return {**moved, "buckets": buckets}
