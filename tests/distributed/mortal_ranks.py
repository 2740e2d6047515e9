"""Two real ranks that a test can kill, stop and watch dying; `tests.ranks` wants them to succeed.

::

    with MortalRanks(worker, peer_timeout=4.0) as ranks:
        ranks.wait_until(1, says="step 3")
        ranks.send(1, signal.SIGKILL)
        code, output = ranks.end_of(0, within=30)
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.forked_ranks import print_stacks_on_request, start
from tests.ranks import free_ports, rank_environment


def be_rank(worker: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Join the process group, and call the worker."""
    import paddle

    from paddle_recompute.distributed import barrier, join_process_group

    print_stacks_on_request()
    join_process_group()
    paddle.seed(0)
    worker(**arguments)
    barrier()  # rank 0 hosts the store: if it left first, the others would lose it


def results_of(worker: Callable[..., Any], num_ranks: int = 2, **arguments: Any) -> list[Any]:
    """As `run_ranks`, of processes that may not go on afterwards because their run has failed."""
    with tempfile.TemporaryDirectory(prefix="results-") as folder:
        told = {"function": worker, "folder": folder, "its": arguments}
        with MortalRanks(_leave_result, num_ranks, **told) as ranks:
            ends = [ranks.end_of(rank, within=90) for rank in range(num_ranks)]
        for code, output in ends:
            assert code == 0, output
        files = [Path(folder) / str(rank) for rank in range(num_ranks)]
        return [pickle.loads(file.read_bytes()) for file in files]


def assert_rank_0_names_killed_rank_1(worker: Callable[..., Any], **arguments: Any) -> None:
    """`worker`, on two ranks, kills rank 1; rank 0 ends with an error that names it."""
    with MortalRanks(worker, **arguments) as ranks:
        code, output = ranks.end_of(1, within=90)
        assert code == -signal.SIGKILL, output
        code, output = ranks.end_of(0, within=60)
        assert code != 0 and "rank 1 " in output, output


def _leave_result(function: Callable[..., Any], folder: str, its: dict[str, Any]) -> None:
    result = pickle.dumps(function(**its))
    unfinished = Path(folder) / f"{os.getpid()}.unfinished"
    unfinished.write_bytes(result)
    unfinished.rename(Path(folder) / os.environ["PADDLE_TRAINER_ID"])
    # A rank that ended before the others have their results would be one that has died.
    deadline = time.monotonic() + 60
    files = [Path(folder) / str(rank) for rank in range(int(os.environ["PADDLE_TRAINERS_NUM"]))]
    while time.monotonic() < deadline and not all(file.exists() for file in files):
        time.sleep(0.01)
    os._exit(0)


class MortalRanks:
    """Processes that call ``worker(**arguments)`` as ranks, until the end of the ``with`` block."""

    def __init__(self, worker: Callable[..., Any], num_ranks: int = 2, **arguments: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mortal-")
        folder = Path(self._folder.name)
        ports = free_ports(num_ranks + 1)
        self._logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
        self._processes = [
            start(be_rank, rank_environment(rank, ports), log, worker=worker, arguments=arguments)
            for rank, log in enumerate(self._logs)
        ]

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
