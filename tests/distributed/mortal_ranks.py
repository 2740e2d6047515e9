"""Two real ranks that a test can kill, stop and watch dying; `tests.ranks` wants them to succeed.

::

    with MortalRanks(worker, peer_timeout=4.0) as ranks:
        ranks.wait_until(1, says="step 3")
        ranks.send(1, signal.SIGKILL)
        code, output = ranks.end_of(0, within=30)
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.ranks import ROOT, free_ports, rank_environment


class MortalRanks:
    """Processes that call ``worker(**arguments)`` as ranks, until the end of the ``with`` block."""

    def __init__(self, worker: Callable[..., Any], num_ranks: int = 2, **arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mortal-")
        folder = Path(self._folder.name)
        job = pickle.dumps((worker.__module__, worker.__qualname__, arguments))
        (folder / "job1.pkl").write_bytes(job)
        ports = free_ports(num_ranks + 1)
        self._logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
        self._processes = []
        for rank, path in enumerate(self._logs):
            with path.open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-u", "-m", "tests.ranks", str(folder), str(rank)],
                    env=rank_environment(rank, ports),
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            assert process.stdin is not None
            process.stdin.write(b"1\n")
            process.stdin.close()
            self._processes.append(process)

    def __enter__(self) -> MortalRanks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()
        self._folder.cleanup()

    def output(self, rank: int) -> str:
        return self._logs[rank].read_text(errors="replace")

    def wait_until(self, rank: int, *, says: str, within: float = 60.0) -> None:
        deadline = time.monotonic() + within
        while says not in self.output(rank):
            for one, process in enumerate(self._processes):
                if process.poll() not in (None, 0):
                    pytest.fail(f"rank {one} ended early:\n{self.output(one)}", pytrace=False)
            if time.monotonic() > deadline:
                pytest.fail(f"rank {rank} did not say {says!r}:\n{self.output(rank)}")
            time.sleep(0.02)

    def send(self, rank: int, signal_number: signal.Signals) -> None:
        self._processes[rank].send_signal(signal_number)

    def end_of(self, rank: int, *, within: float) -> tuple[int, str]:
        """Exit code and output of `rank`, which must end in that many seconds."""
        try:
            code = self._processes[rank].wait(within)
        except subprocess.TimeoutExpired:
            self.send(rank, signal.SIGUSR1)  # where are its threads?
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[rank].wait(2)
            pytest.fail(f"rank {rank} still runs after {within} s:\n{self.output(rank)}")
        return code, self.output(rank)
