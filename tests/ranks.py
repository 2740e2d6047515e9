"""Start real ranks (gloo, CPU, one process each) for a test and bring their results back.

A test passes a function of its own module; every rank imports that module, joins the process
group and calls it::

    def worker(scale: float) -> dict:
        return {"rank": dist.get_rank(), "value": scale}

    def test_something():
        results = run_ranks(worker, num_ranks=2, scale=3.0)

A rank that fails, or does not end in time, fails the test with that rank's own output.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

PATIENCE = 5.0
"""Seconds that the other ranks have to end after one has failed."""

CONNECTING = 15.0
"""Seconds for the ranks to connect when all have started, where that is tried again."""
CONNECTION_ATTEMPTS = 5
"""Of three ranks or more, ``init_parallel_env`` fails or hangs once in about ten times (gloo of
Paddle 2.6.2 and 3.3.1: "Connection refused"), before any code of ours runs.
"""

ROOT = Path(__file__).resolve().parent.parent


def free_ports(count: int) -> list[int]:
    """`count` TCP ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def rank_environment(rank: int, ports: list[int]) -> dict[str, str]:
    """The variables that Paddle's launcher sets, for `rank` of ``len(ports) - 1`` ranks."""
    master, *own = ports
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
    }


def run_ranks(
    worker: Callable[..., Any], num_ranks: int, *, timeout: float = 90.0, **arguments: Any
) -> list[Any]:
    """Call ``worker(**arguments)`` on `num_ranks` ranks; returns their results in rank order.

    Args:
        worker: A module-level function of a test module. Its result must be picklable.
        num_ranks: How many processes; each is one gloo rank on this machine.
        timeout: Seconds for all ranks together.
        **arguments: Picklable keyword arguments, the same for every rank.
    """
    deadline = time.monotonic() + timeout
    for attempts_left in reversed(range(CONNECTION_ATTEMPTS if num_ranks > 2 else 1)):
        results = _run_once(worker, num_ranks, deadline, arguments, try_again=attempts_left > 0)
        if results is not None:
            return results
    raise AssertionError("the last attempt returns or fails")


def _run_once(
    worker: Callable[..., Any],
    num_ranks: int,
    deadline: float,
    arguments: dict[str, Any],
    *,
    try_again: bool,
) -> list[Any] | None:
    """The results; None if the ranks did not connect and it is to be tried again."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Path(folder) / "job.pkl"
        job.write_bytes(pickle.dumps((worker.__module__, worker.__qualname__, arguments)))
        ports = free_ports(num_ranks + 1)
        processes, logs = [], []
        for rank in range(num_ranks):
            logs.append(Path(folder) / f"rank{rank}.log")
            with logs[-1].open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.ranks", folder, str(rank)],
                        env=rank_environment(rank, ports),
                        cwd=ROOT,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        connected = partial(_have_connected, Path(folder), num_ranks) if try_again else None
        failed = _wait_for_all(processes, deadline, connected)
        if failed is not None:
            if connected is not None and not connected():
                return None
            rank, reason = failed
            output = logs[rank].read_text(errors="replace")[-6000:]
            pytest.fail(
                f"rank {rank} of {num_ranks} {reason}; its output:\n{output}", pytrace=False
            )
        return [
            pickle.loads((Path(folder) / f"result{rank}.pkl").read_bytes())
            for rank in range(num_ranks)
        ]


def _have_connected(folder: Path, num_ranks: int) -> bool | None:
    """None as long as it is too early to tell."""
    if len([*folder.glob("connected*")]) == num_ranks:
        return True
    started = [path.stat().st_mtime for path in folder.glob("started*")]
    is_late = len(started) == num_ranks and time.time() - max(started) > CONNECTING
    return False if is_late else None


def _wait_for_all(
    processes: list[subprocess.Popen[bytes]],
    deadline: float,
    connected: Callable[[], bool | None] | None = None,
) -> tuple[int, str] | None:
    """The first rank that failed and how, after every process has ended; None if none did.

    When a rank has failed the others have a few seconds to fail in their turn, then they are ended.
    """
    failed = None
    try:
        while any(process.poll() is None for process in processes):
            codes = [process.poll() for process in processes]
            wrong = [rank for rank, code in enumerate(codes) if code not in (0, None)]
            if wrong and failed is None:
                failed = (wrong[0], f"ended with code {codes[wrong[0]]}")
                deadline = min(deadline, time.monotonic() + PATIENCE)
            hangs = connected is not None and connected() is False
            if hangs or time.monotonic() > deadline:
                late = next(rank for rank, code in enumerate(codes) if code is None)
                return failed or (late, "did not end in time")
            time.sleep(0.05)
        codes = [process.poll() for process in processes]
        wrong = [rank for rank, code in enumerate(codes) if code != 0]
        return failed or ((wrong[0], f"ended with code {codes[wrong[0]]}") if wrong else None)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _main(folder: str, rank: str) -> None:
    import importlib

    import paddle.distributed as dist

    from paddle_recompute.distributed import barrier

    module, name, arguments = pickle.loads((Path(folder) / "job.pkl").read_bytes())
    worker = getattr(importlib.import_module(module), name)
    (Path(folder) / f"started{rank}").touch()
    dist.init_parallel_env()
    (Path(folder) / f"connected{rank}").touch()
    result = worker(**arguments)
    (Path(folder) / f"result{rank}.pkl").write_bytes(pickle.dumps(result))
    barrier()  # rank 0 hosts the store: if it left first, the others would lose it


if __name__ == "__main__":
    _main(*sys.argv[1:])
