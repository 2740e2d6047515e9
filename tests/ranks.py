"""Start real ranks (one process each) for a test and bring their results back.

They are gloo ranks on the CPU, or ranks of the simulated device where the tests run on that.

A test passes a function of its own module; every rank imports that module, joins the process
group and calls it::

    def worker(scale: float) -> dict:
        return {"rank": dist.get_rank(), "value": scale}

    def test_something():
        results = run_ranks(worker, num_ranks=2, scale=3.0)

A rank that fails, or does not end in time, fails the test with that rank's own output.

Two ranks, or three, serve one test after the other. A test whose worker leaves its process
unusable, or measures what a process holds, says ``fresh=True`` and has processes of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_device import selected
from tests.forked_ranks import ROOT, print_stacks_on_request, start

PATIENCE = 5.0
"""Seconds that the other ranks have to end after one has failed."""


def free_ports(count: int) -> list[int]:
    """`count` TCP ports that were free a moment ago, all different.

    They are below those that Linux gives to connections: other tests make many meanwhile.
    """
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.add(port)
    return [*found]


def rank_environment(rank: int, ports: list[int]) -> dict[str, str]:
    """The variables that Paddle's launcher sets, for `rank` of ``len(ports) - 1`` ranks."""
    master, *own = ports
    device = selected.rank_settings(rank) if selected.is_selected() else {}
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(own)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{port}" for port in own),
        "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{own[rank]}",
        "PADDLE_MASTER": f"127.0.0.1:{master}",
        "PADDLE_DISTRI_BACKEND": "gloo",
        **device,
    }


def ranks_started_by(command: int) -> dict[int, int]:
    """The process of each rank that the main thread of the process `command` has started."""
    found = {}
    with contextlib.suppress(OSError):  # one of them has ended meanwhile
        for pid in Path(f"/proc/{command}/task/{command}/children").read_text().split():
            for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = variable.partition(b"=")
                if name == b"PADDLE_TRAINER_ID":
                    found[int(value)] = int(pid)
    return found


def run_ranks(
    worker: Callable[..., Any],
    num_ranks: int,
    *,
    timeout: float = 90.0,
    fresh: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Call ``worker(**arguments)`` on `num_ranks` ranks; returns their results in rank order.

    Args:
        worker: A module-level function of a test module. Its result must be picklable.
        num_ranks: How many processes; each is one rank on this machine.
        timeout: Seconds for all ranks together.
        fresh: Whether the ranks are processes of this call alone.
        **arguments: Picklable keyword arguments, the same for every rank.
    """
    ranks = None if fresh else _pool.pop(num_ranks, None)
    ranks = ranks or _Ranks(num_ranks)
    job = pickle.dumps((worker.__module__, worker.__qualname__, arguments))
    try:
        return ranks.run(job, timeout)
    finally:
        if fresh or num_ranks not in POOLED or not ranks.can_go_on():
            ranks.end()
        else:
            ranks.stop()
            _pool[num_ranks] = ranks
            _end_pool_at_exit()


def each_on_ranks(*checks: Callable[[], None], num_ranks: int = 2) -> Callable[..., None]:
    """A test for each of `checks`, which every rank calls; its id is the name without ``check_``.

    ::

        test_on_two_ranks = each_on_ranks(check_this, check_that)
    """

    @pytest.mark.parametrize("check", checks, ids=lambda one: one.__name__.removeprefix("check_"))
    def test(check: Callable[[], None]) -> None:
        run_ranks(check, num_ranks)

    return test


POOLED = (2, 3)
"""The numbers of ranks that are kept from one test to the next.

Three ranks wait 10 s and more until gloo has made a group of them (`distributed.groups`).
"""
MOST_THREADS = 96
"""Of a rank that is kept. Each gloo group leaves two threads for good, which wake up 100 times a
second; with 200 of them a rank that does nothing takes a tenth of a core. So ranks are stopped
between two jobs.
"""


class _Ranks:
    """Processes that wait for jobs, each of them a rank."""

    def __init__(self, num_ranks: int) -> None:
        self.are_broken = False
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        ports = free_ports(num_ranks + 1)
        folder = Path(self._folder.name)
        self._logs = [folder / f"rank{rank}.log" for rank in range(num_ranks)]
        for rank in range(num_ranks):
            os.mkfifo(folder / f"jobs{rank}")
        # Read and write: so to open one does not wait for a rank, which may never come.
        self._jobs = [
            (folder / f"jobs{rank}").open("r+b", buffering=0) for rank in range(num_ranks)
        ]
        self._processes = [
            start(_serve, rank_environment(rank, ports), log, folder=folder, rank=rank)
            for rank, log in enumerate(self._logs)
        ]
        self._num_jobs = 0

    def run(self, job: bytes, timeout: float) -> list[Any]:
        """The results of `job` on every rank."""
        self._num_jobs += 1
        self._send(signal.SIGCONT)
        began = [log.stat().st_size for log in self._logs]
        (Path(self._folder.name) / f"job{self._num_jobs}.pkl").write_bytes(job)
        for jobs in self._jobs:
            jobs.write(f"{self._num_jobs}\n".encode())
        results = [
            Path(self._folder.name) / f"result{self._num_jobs}of{rank}.pkl"
            for rank in range(len(self._processes))
        ]
        failed = self._wait(results, time.monotonic() + timeout)
        if failed is not None:
            self.are_broken = True
            rank, reason = failed
            output = self._logs[rank].read_bytes()[began[rank] :].decode(errors="replace")
            pytest.fail(
                f"rank {rank} of {len(results)} {reason}; its output:\n{output[-6000:]}",
                pytrace=False,
            )
        return [pickle.loads(result.read_bytes()) for result in results]

    def _wait(self, results: list[Path], deadline: float) -> tuple[int, str] | None:
        """The first rank that failed and how, when every rank is done; None if none did.

        When a rank has failed the others have a few seconds to fail in their turn.
        """
        failed = None
        while not all(result.exists() for result in results):
            codes = [process.poll() for process in self._processes]
            wrong = [rank for rank, code in enumerate(codes) if code is not None]
            if wrong and failed is None:
                failed = (wrong[0], f"ended with code {codes[wrong[0]]}")
                deadline = min(deadline, time.monotonic() + PATIENCE)
            if failed is not None and None not in codes:
                return failed
            if time.monotonic() > deadline:
                late = next(rank for rank, result in enumerate(results) if not result.exists())
                return failed or (late, "did not end in time")
            time.sleep(0.01)
        return None

    def can_go_on(self) -> bool:
        """Whether the ranks may do another job."""
        if self.are_broken:
            return False
        num_threads = [len(os.listdir(f"/proc/{one.pid}/task")) for one in self._processes]
        return max(num_threads) <= MOST_THREADS

    def stop(self) -> None:
        """Until the next job. New processes are no children of the server, which continues its own
        where this process dies.
        """
        if not selected.is_selected():
            self._send(signal.SIGSTOP)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def end(self) -> None:
        """Let the ranks end in good order; kill those that do not."""
        self._send(signal.SIGCONT)
        for jobs in self._jobs:
            jobs.close()
        deadline = time.monotonic() + (0.0 if self.are_broken else PATIENCE)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


_pool: dict[int, _Ranks] = {}


def _end_pool() -> None:
    while _pool:
        _pool.popitem()[1].end()


@functools.cache
def _end_pool_at_exit() -> None:
    """To be called when ranks have been started: before the server that forks them ends."""
    atexit.register(_end_pool)


def _serve(folder: Path, rank: int) -> None:
    """Do job after job, until there are no more."""
    import gc
    import importlib

    import paddle

    from paddle_recompute.distributed import barrier, join_process_group

    print_stacks_on_request()
    join_process_group()
    for number in map(str.strip, (folder / f"jobs{rank}").open()):
        module, name, arguments = pickle.loads((folder / f"job{number}.pkl").read_bytes())
        # As in a new process: an earlier job may have left these otherwise.
        paddle.seed(0)
        paddle.set_default_dtype("float32")
        if module not in sys.modules:
            importlib.import_module(module)
            gc.freeze()  # imported modules are no garbage; a collection would take 0.1 s with them
        result = getattr(sys.modules[module], name)(**arguments)
        unfinished = folder / f"result{number}of{rank}.unfinished"
        unfinished.write_bytes(pickle.dumps(result))
        del result
        gc.collect()
        barrier()  # rank 0 hosts the store: if it left first, the others would lose it
        unfinished.rename(folder / f"result{number}of{rank}.pkl")
