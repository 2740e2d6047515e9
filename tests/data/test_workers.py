"""Processes that make batches: in order, and never a parent that waits forever."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from paddle_recompute.data._workers import Workers
from paddle_recompute.errors import DataError
from tests.data.processes import children
from tests.ranks import ROOT

LARGE = 1 << 20
"""Bytes that no socket takes: whoever sends them waits for the reader."""


def large(number: int) -> Any:
    return np.full(LARGE, number, np.uint8)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


@pytest.mark.parametrize("num_workers", [1, 2, 5])
@pytest.mark.parametrize("num_tasks", [0, 1, 4, 11])
def test_all_batches_come_in_order(num_tasks: int, num_workers: int) -> None:
    workers = Workers(large, range(num_tasks), num_workers, longest_wait=30)
    assert [batch[0] for batch in workers] == list(range(num_tasks))
    workers.close()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_one_that_is_killed_while_it_sends(num_workers: int) -> None:
    workers = Workers(large, range(9), num_workers, longest_wait=30)
    batches = iter(workers)
    next(batches)
    os.kill(workers.pids[0], signal.SIGKILL)
    with pytest.raises(DataError, match=r"has died, of signal 9 \(Killed; is the machine out of"):
        list(batches)
    workers.close()


def test_one_that_is_stopped_while_it_sends() -> None:
    workers = Workers(large, range(9), 2, longest_wait=0.5)
    batches = iter(workers)
    next(batches)
    os.kill(workers.pids[0], signal.SIGSTOP)
    with pytest.raises(DataError, match="no batch came within 0 s"):
        list(batches)
    workers.close()


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
    other = Workers(large, range(5), 1, longest_wait=30)
    os.kill(mine.pids[0], signal.SIGKILL)
    assert len(list(other)) == 5
    with pytest.raises(DataError, match="has died"):
        list(mine)
    mine.close()
    other.close()


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
    assert "of signal 9" in str(ends[0])


def test_nothing_is_left_of_workers_that_are_forgotten() -> None:
    Workers(large, range(5), 2, longest_wait=30)


def test_a_fork_that_ends_does_not_end_its_parents_workers() -> None:
    workers = Workers(large, range(4), 1, longest_wait=30)
    fork = os.fork()
    if not fork:
        workers.close()
        os._exit(0)
    os.waitpid(fork, 0)
    assert len(list(workers)) == 4
    workers.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_sent_to_all_processes_ends_no_worker(number: signal.Signals) -> None:
    """The parent finishes its step and saves it; for that it may need a batch."""
    workers = Workers(large, range(9), 2, longest_wait=30)
    for pid in workers.pids:
        os.kill(pid, number)
    assert len(list(workers)) == 9
    workers.close()


class Guarded:
    """An object that must not be destroyed in a fork: Paddle's wait for a thread there."""

    owner = os.getpid()

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os._exit(77)


def with_a_collection(number: int) -> int:
    gc.collect()
    return number


def test_no_worker_collects_what_is_its_parents() -> None:
    gc.disable()
    try:
        Guarded()
        workers = Workers(with_a_collection, range(3), 1, longest_wait=30)
        assert list(workers) == [0, 1, 2]
        workers.close()
    finally:
        gc.enable()


def test_processes_that_the_system_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, started = os.fork, []

    def limited() -> int:
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(1)
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    with pytest.raises(DataError, match=r"only 2 of 5 processes could be started .*; lower it"):
        Workers(large, range(5), 5, longest_wait=30)


STOPPED = """
import tempfile
tempfile.TemporaryDirectory()  # what ends the workers must not depend on what was there before
import os, signal
from paddle_recompute.data._workers import Workers
from tests.data.test_workers import large
workers = Workers(large, range(99), 2, longest_wait=30)
batches = iter(workers)
next(batches)
os.kill(workers.pids[0], signal.SIGSTOP)
"""


def test_a_stopped_worker_does_not_keep_the_interpreter_from_ending() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STOPPED],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (0, b"")


KILLED = """
import os, signal
from paddle_recompute.data._workers import Workers
from tests.data.test_workers import large
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
