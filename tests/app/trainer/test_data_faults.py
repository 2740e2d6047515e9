"""Data that fails on one rank, and clocks that jump: all ranks end, or none does."""

from __future__ import annotations

import itertools
import re
import time
from pathlib import Path
from typing import Any

import paddle.distributed as dist
import pytest

from paddle_recompute.app.data import PairLoader
from paddle_recompute.app.trainer import Trainer
from tests.app.trainer.test_trainer import tiny, unmeasured, write_pairs
from tests.distributed.mortal_ranks import MortalRanks
from tests.ranks import run_ranks


@unmeasured
def train(folder: str) -> None:
    """Rank 1 has a pair without words, in its second batch."""
    if dist.get_rank() == 1:
        collate, calls = PairLoader._collate, itertools.count()

        def faulty(self: PairLoader, rows: list[int], *of_the_draw: int) -> Any:
            if next(calls) == 1:
                raise ValueError("pair 17 has no words")
            return collate(self, rows, *of_the_draw)

        PairLoader._collate = faulty  # type: ignore[method-assign]
    settings = {"train__max_steps": 40, "launch__num_ranks": 2, "train__eval_before": False}
    Trainer(tiny(Path(folder), **settings)).run()


@pytest.mark.timeout(200)  # more than both limits: a rank that hangs prints its stacks
def test_a_fault_of_one_rank_ends_all_of_them(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    with MortalRanks(train, folder=str(tmp_path)) as ranks:
        ends = [ranks.end_of(1, within=120), ranks.end_of(0, within=60)]
    for code, output in ends:
        assert code == 1, output
    assert "ValueError: pair 17 has no words" in ends[0][1]
    assert re.search(r"PeerError: rank 1 failed .*: ValueError: pair 17 has no words", ends[1][1])


@unmeasured
def train_with_a_clock_that_jumps(folder: str) -> float:
    """A day forth and back, at each look, on one rank."""
    true, jumps = time.time, itertools.cycle([0.0, 86400.0, -86400.0])
    if dist.get_rank() == 1:
        time.time = lambda: true() + next(jumps)  # type: ignore[assignment]
    try:
        record = Trainer(
            tiny(Path(folder), train__max_steps=4, train__save_every=2, launch__num_ranks=2)
        ).run()
        return float(record["loss"])
    finally:
        time.time = true


def test_a_clock_that_jumps_ends_nothing(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    one, other = run_ranks(train_with_a_clock_that_jumps, 2, folder=str(tmp_path))
    assert one == other
