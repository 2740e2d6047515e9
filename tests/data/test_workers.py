"""Processes that make batches: in order, and never a parent that waits forever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest

from paddle_recompute.data._workers import Workers
from paddle_recompute.errors import DataError
from tests.ranks import ROOT

LARGE = 1 << 20
"""Bytes that no socket takes: whoever sends them waits for the reader."""


def large(number: int) -> Any:
    return np.full(LARGE, number, np.uint8)


def running() -> list[BaseProcess]:
    return multiprocessing.active_children()


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("num_tasks", [0, 1, 4, 11])
def test_all_batches_come_in_order(num_tasks: int, num_workers: int) -> None:
    workers = Workers(large, range(num_tasks), num_workers, longest_wait=30)
    assert [batch[0] for batch in workers] == list(range(num_tasks))
    workers.close()
    assert not running()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_one_that_is_killed_while_it_sends(num_workers: int) -> None:
    workers = Workers(large, range(9), num_workers, longest_wait=30)
    batches = iter(workers)
    next(batches)
    running()[0].kill()
    with pytest.raises(DataError, match=r"has died, by SIGKILL \(is the machine out of memory"):
        list(batches)
    workers.close()
    assert not running()


def test_one_that_is_stopped_while_it_sends() -> None:
    workers = Workers(large, range(9), 2, longest_wait=0.5)
    batches = iter(workers)
    next(batches)
    os.kill(running()[0].pid or 0, signal.SIGSTOP)
    with pytest.raises(DataError, match="no batch came within 0 s"):
        list(batches)
    workers.close()
    assert not running()


def test_an_error_is_printed_and_told(capfd: pytest.CaptureFixture[str]) -> None:
    workers = Workers(lambda number: 12 // (3 - number), range(9), 1, longest_wait=30)
    batches = iter(workers)
    assert [next(batches) for _ in range(3)] == [4, 6, 12]
    with pytest.raises(DataError, match=r"has died, with code 1 \(its error is above\)"):
        next(batches)
    assert "ZeroDivisionError" in capfd.readouterr().err
    workers.close()


def test_the_others_go_on() -> None:
    mine = Workers(large, range(5), 1, longest_wait=30)
    (worker,) = running()
    other = Workers(large, range(5), 1, longest_wait=30)
    worker.kill()
    assert len(list(other)) == 5
    with pytest.raises(DataError, match="has died"):
        list(mine)


def test_closing_ends_the_wait_of_a_thread() -> None:
    workers = Workers(lambda _: threading.Event().wait(), range(1), 1, longest_wait=600)
    ends: list[DataError] = []

    def wait() -> None:
        try:
            list(workers)
        except DataError as error:
            ends.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    workers.close()
    thread.join(30)
    assert not thread.is_alive()
    assert "by SIGKILL" in str(ends[0])


def test_nothing_is_left_of_workers_that_are_forgotten() -> None:
    Workers(large, range(5), 2, longest_wait=30)
    assert not running()


KILLED = """
import os, signal
from paddle_recompute.data._workers import Workers
from tests.data.test_workers import large, running
batches = iter(Workers(large, range(99), 3, longest_wait=30))
next(batches)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_their_parent() -> None:
    """They hold its standard output, which is read to its end."""
    ended = subprocess.run(
        [sys.executable, "-c", KILLED],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert ended.returncode == -signal.SIGKILL
