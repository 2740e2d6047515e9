"""Data that fails on one rank, and clocks that jump: all ranks end, or none does."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import paddle.distributed as dist
import pytest

from paddle_recompute.data import PairLoader, loader
from paddle_recompute.trainer import Trainer
from tests.distributed.mortal_ranks import MortalRanks
from tests.ranks import run_ranks
from tests.trainer.test_trainer import tiny, write_pairs


def train(folder: str, fault: str) -> None:
    """Rank 1 has the fault, after some batches."""
    workers = 0 if fault == "bad pair" else 1
    if dist.get_rank() == 1:
        loader.LONGEST_WAIT = 3.0
        made, collate, calls = PairLoader.__iter__, PairLoader._collate, itertools.count()

        def faulty_iter(self: PairLoader) -> Any:
            for number, batch in enumerate(made(self)):
                if number == 1 and fault == "bad pair":
                    raise ValueError("pair 17 has no words")
                yield batch

        def faulty_collate(self: PairLoader, rows: list[int]) -> Any:
            if next(calls) == 2 and workers:  # in the worker
                os.kill(os.getpid(), signal.SIGKILL if fault == "dies" else signal.SIGSTOP)
            return collate(self, rows)

        PairLoader.__iter__ = faulty_iter  # type: ignore[method-assign]
        PairLoader._collate = faulty_collate  # type: ignore[method-assign]
    settings = {
        "train__max_steps": 40,
        "launch__num_ranks": 2,
        "data__num_workers": workers,
        "train__eval_before": False,
    }
    Trainer(tiny(Path(folder), **settings)).run()


FAULTS = {
    "dies": "DataError: data.num_workers: a process that makes batches has died",
    "hangs": "DataError: data.num_workers: no batch came within 3 s",
    "bad pair": "ValueError: pair 17 has no words",
}


@pytest.mark.timeout(200)  # more than both limits: a rank that hangs prints its stacks
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_ends_all_of_them(fault: str, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    with MortalRanks(train, folder=str(tmp_path), fault=fault) as ranks:
        ends = [ranks.end_of(1, within=120), ranks.end_of(0, within=60)]
    for code, output in ends:
        assert code == 1, output
    assert FAULTS[fault] in ends[0][1]
    assert re.search(rf"PeerError: rank 1 failed .*: {re.escape(FAULTS[fault])}", ends[1][1])


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
