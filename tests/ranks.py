"""Start real ranks (one process each) for a test and bring their results back.

They are gloo ranks on the CPU, or ranks of the simulated device where the tests run on that.

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
from pathlib import Path
from typing import Any

import pytest

from tests.fake_device import selected

PATIENCE = 5.0
"""Seconds that the other ranks have to end after one has failed."""

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


def run_ranks(
    worker: Callable[..., Any], num_ranks: int, *, timeout: float = 90.0, **arguments: Any
) -> list[Any]:
    """Call ``worker(**arguments)`` on `num_ranks` ranks; returns their results in rank order.

    Args:
        worker: A module-level function of a test module. Its result must be picklable.
        num_ranks: How many processes; each is one rank on this machine.
        timeout: Seconds for all ranks together.
        **arguments: Picklable keyword arguments, the same for every rank.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Path(folder) / "job.pkl"
        job.write_bytes(pickle.dumps((worker.__module__, worker.__qualname__, arguments)))
        ports = free_ports(num_ranks + 1)
        deadline = time.monotonic() + timeout
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
        failed = _wait_for_all(processes, deadline)
        if failed is not None:
            rank, reason = failed
            output = logs[rank].read_text(errors="replace")[-6000:]
            pytest.fail(
                f"rank {rank} of {num_ranks} {reason}; its output:\n{output}", pytrace=False
            )
        return [
            pickle.loads((Path(folder) / f"result{rank}.pkl").read_bytes())
            for rank in range(num_ranks)
        ]


def _wait_for_all(
    processes: list[subprocess.Popen[bytes]], deadline: float
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
            if time.monotonic() > deadline:
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
    dist.init_parallel_env()
    result = worker(**arguments)
    (Path(folder) / f"result{rank}.pkl").write_bytes(pickle.dumps(result))
    barrier()  # rank 0 hosts the store: if it left first, the others would lose it


if __name__ == "__main__":
    _main(*sys.argv[1:])
