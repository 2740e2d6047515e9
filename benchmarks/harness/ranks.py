"""Real ranks for a benchmark, one process each, in the namespaces of `_network` or outside of any.

A benchmark passes a function of its own module; each rank imports that module, joins the process
group and calls it. What it returns must be picklable. What rank 0 prints is handed to the caller
line by line, for progress.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.network import Host
from benchmarks.harness.record import ROOT
from paddle_recompute.app.launch._rank_process import die_with_parent
from paddle_recompute.app.launch._rank_settings import quiet_settings, speed_settings

FIRST_PORT = 23456
"""In a namespace of one's own, where nobody else listens."""
PATIENCE = 10.0
"""Seconds that the other ranks have to end after one has failed."""
START_SECONDS = 90.0
"""For importing Paddle and connecting all ranks."""
STARTED = "all ranks are connected"


class RanksFailedError(RuntimeError):
    """A rank failed or did not end in time; the message holds the end of its output."""


def run_ranks(
    function: Callable[..., Any],
    hosts: Sequence[Host],
    *,
    timeout: float,
    on_line: Callable[[str], None] = lambda line: None,
    **arguments: Any,
) -> list[Any]:
    """Call ``function(**arguments)`` on one rank per host; returns the results in rank order.

    Args:
        function: At the top of a module.
        hosts: Where each rank runs. Rank i is bound to core i modulo the machine's cores.
        timeout: Seconds from when the ranks are connected.
        on_line: Gets each line that rank 0 prints.
        **arguments: Picklable, the same for every rank.

    Raises:
        RanksFailedError: See there. No process is left.
    """
    cores = sorted(os.sched_getaffinity(0))
    master, *endpoints = _endpoints(hosts)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        # A module that is run as a program has no name to import it by.
        module = function.__module__
        if module == "__main__":
            module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
        job = (module, function.__qualname__, arguments)
        (Path(folder) / "job.pkl").write_bytes(pickle.dumps(job))
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, host in enumerate(hosts):
                with (Path(folder) / f"{rank}.log").open("wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [*host.command, sys.executable, "-m", __name__, folder, str(rank)],
                            env=_environment(rank, host, master, endpoints, len(cores)),
                            cwd=ROOT,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,  # Ctrl-C is for this process alone
                            preexec_fn=functools.partial(_prepare, cores[rank % len(cores)]),
                        )
                    )
            _watch(processes, Path(folder), timeout, on_line)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [
            pickle.loads((Path(folder) / f"{rank}.pkl").read_bytes()) for rank in range(len(hosts))
        ]


def _prepare(core: int) -> None:
    os.sched_setaffinity(0, {core})
    die_with_parent(signal.SIGKILL)


def _watch(
    processes: list[subprocess.Popen[bytes]],
    folder: Path,
    timeout: float,
    on_line: Callable[[str], None],
) -> None:
    """Return when every rank has ended well."""
    failed: int | None = None
    deadline = time.monotonic() + START_SECONDS
    with (folder / "0.log").open(encoding="utf-8", errors="replace") as output:
        rest = ""
        while True:
            running = any(process.poll() is None for process in processes)
            *lines, rest = (rest + output.read()).split("\n")
            for line in lines:
                if line == STARTED:
                    deadline = time.monotonic() + timeout
                else:
                    on_line(line)
            codes = [process.poll() for process in processes]
            wrong = [rank for rank, code in enumerate(codes) if code not in (0, None)]
            if wrong and failed is None:
                failed, deadline = wrong[0], min(deadline, time.monotonic() + PATIENCE)
            if not running:
                break
            if time.monotonic() > deadline:
                failed = codes.index(None) if failed is None else failed
                break
            time.sleep(0.1)
    if failed is not None:
        code = codes[failed]
        how = "did not end in time" if code is None else f"ended with code {code}"
        said = (folder / f"{failed}.log").read_text(encoding="utf-8", errors="replace")[-4000:]
        raise RanksFailedError(f"rank {failed} of {len(processes)} {how}; its output:\n{said}")


def _endpoints(hosts: Sequence[Host]) -> list[str]:
    """The store's address, then one for each rank."""
    if hosts[0].namespace is not None:
        return [f"{hosts[0].address}:{FIRST_PORT}"] + [
            f"{host.address}:{FIRST_PORT + 1}" for host in hosts
        ]
    sockets = [socket.socket() for _ in range(len(hosts) + 1)]
    try:
        for one in sockets:
            one.bind((hosts[0].address, 0))
        return [f"{hosts[0].address}:{one.getsockname()[1]}" for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _environment(
    rank: int, host: Host, master: str, endpoints: list[str], num_cores: int
) -> dict[str, str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # a rank has one core
        "PYTHONUNBUFFERED": "1",
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(endpoints)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_MASTER": master,
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    environment |= speed_settings(num_cores, environment) | quiet_settings(environment)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    if host.interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = host.interface
    return environment


def _main(folder: str, rank: str) -> None:
    import paddle

    from paddle_recompute.distributed import barrier, join_process_group
    from paddle_recompute.grad_sync import GradientSync

    module, name, arguments = pickle.loads((Path(folder) / "job.pkl").read_bytes())
    function = getattr(importlib.import_module(module), name)
    join_process_group()
    GradientSync(paddle.nn.Linear(1, 1))  # makes the group that all others of this process use
    if rank == "0":
        print(STARTED, flush=True)
    result = function(**arguments)
    (Path(folder) / f"{rank}.pkl").write_bytes(pickle.dumps(result))
    barrier()  # rank 0 hosts the store: if it left first, the others would lose it


if __name__ == "__main__":
    _main(*sys.argv[1:])
