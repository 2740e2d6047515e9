"""A rank that ends while its thread is in a collective: its exit code is its own, not SIGABRT."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import paddle
import paddle.distributed as dist

from paddle_recompute.distributed.connection import peers
from paddle_recompute.distributed.gloo_lane import lane_of
from paddle_recompute.distributed.ranks import scope_of
from tests.distributed.mortal_ranks import MortalRanks


class SlowEnd:
    """The interpreter is in its finalization, for so many seconds; then it prints the time."""

    def __init__(self, seconds: float) -> None:
        self._sleep, self._seconds = time.sleep, seconds
        self._write, self._now = os.write, time.monotonic

    def __del__(self) -> None:
        self._sleep(self._seconds)
        self._write(1, f"ended at {self._now()}\n".encode())


def end_in_a_collective(folder: str, exit_code: int | None, peer_lives_on: float) -> None:
    """Rank 0 ends, with its thread in a collective that fails `peer_lives_on` seconds later."""
    lane = lane_of(scope_of(None), "of this test")
    ended = Path(folder) / "ended"
    if dist.get_rank() == 1:
        while not ended.exists():
            time.sleep(0.01)
        time.sleep(peer_lives_on)
        os._exit(0)
    # Paddle keeps it up to the end of the interpreter.
    paddle.slow_end = SlowEnd(peer_lives_on + 3.0)
    lane.begin(lambda group: dist.all_reduce(paddle.ones([1]), group=group), "a sum")
    time.sleep(0.5)
    peers().shutdown.has_announced = True  # rank 1 is not to hear of it
    peers().fail = lambda error: error  # type: ignore[method-assign]
    ended.touch()
    if exit_code is None:
        raise ValueError("a file is missing")
    sys.exit(exit_code)


def test_a_rank_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    """Also where its peer lives on. All cases at once: they wait most of the time."""
    cases = [(None, 1.5), (3, 8.0), (0, 8.0)]
    with contextlib.ExitStack() as stack:
        started = []
        for number, (exit_code, peer_lives_on) in enumerate(cases):
            folder = tmp_path / str(number)
            folder.mkdir()
            told = {"exit_code": exit_code, "peer_lives_on": peer_lives_on}
            ranks = MortalRanks(end_in_a_collective, folder=str(folder), **told)
            started.append(stack.enter_context(ranks))
        ends = [ranks.end_of(0, within=60) for ranks in started]
    for (exit_code, _), (code, output) in zip(cases, ends, strict=True):
        assert code == (1 if exit_code is None else exit_code), output
        assert "terminate called" not in output
        assert ("ValueError: a file is missing" in output) == (exit_code is None)


def end_with_a_slow_peer() -> None:
    """Both ranks end well; rank 1 takes its time for it."""
    scope = scope_of(None)
    peers().exchange("the end", scope)
    if dist.get_rank() == 1:
        paddle.slow_end = SlowEnd(2.0)


def test_rank_0_whose_process_has_the_store_ends_last() -> None:
    with MortalRanks(end_with_a_slow_peer) as ranks:
        assert ranks.end_of(0, within=60)[0] == 0
        assert ranks.end_of(1, within=0.5)[0] == 0
