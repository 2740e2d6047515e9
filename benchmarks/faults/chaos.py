"""Kill ranks at random, resume, and compare the parameters with those of a run left alone.

    python -m benchmarks.faults.chaos                     # 20 kills in each of four ways to train
    python -m benchmarks.faults.chaos --kills 5 --only static

Two ranks on this machine; a rank or the launcher is killed with SIGKILL at a random moment of the
training, saving included. The same command (``train.resume=auto``) is started again each time.
Takes about five minutes for each way where nothing else runs. The
longest start is the longest time from the command to its next checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file

from benchmarks.harness.record import RESULTS, table, write_record
from paddle_recompute.checkpoint import find_checkpoint
from tests.app.trainer.test_trainer import tiny, write_pairs
from tests.ranks import ranks_started_by

ROOT = RESULTS.parent.parent
WAYS: dict[str, dict[str, Any]] = {
    "dygraph": {},
    "static": {"mode": "static"},
    "gradient cache": {"contrastive__chunk_size": 2},
    "bf16 compression": {"sync__compression": "bf16"},
}
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

    def __init__(self, way: str, what: str, folder: Path) -> None:
        logs = [folder / "log", *sorted(folder.glob("*/logs/*log*"))]
        words = [
            f"--- {log}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.is_file()
        ]
        super().__init__("\n".join([f"{way}: {what}", *words]))


def start_python(log: Path, *arguments: object, **variables: str) -> subprocess.Popen[bytes]:
    """A Python with one thread per operator, whose words go to the end of `log`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def start(config: Path, log: Path) -> subprocess.Popen[bytes]:
    """The command, once."""
    return start_python(log, "-m", "paddle_recompute", "train", "--config", config)


def begin(name: str, changes: dict[str, Any], steps: int, folder: Path) -> Path:
    """Run `whole`, which nobody disturbs, to its end; the configuration of the run `killed`."""
    write_pairs(folder / "pairs.tsv")
    files = {}
    for run in ("whole", "killed"):
        settings = {**COMMON, **changes, "train__max_steps": steps,
                    "train__output_dir": str(folder / run)}  # fmt: skip
        files[run] = folder / f"{run}.yaml"
        files[run].write_text(yaml.safe_dump(tiny(folder, **settings).to_dict()))
    if start(files["whole"], folder / "log").wait(600):
        raise Failed(name, "the run that nobody disturbs fails", folder)
    return files["killed"]


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    steps = [int(path.name[5:]) for path in (folder / "checkpoint").glob("step-*")]
    return max(steps, default=0)


def wait_and_kill(
    run: subprocess.Popen[bytes], folder: Path, after: int, chance: random.Random
) -> str | None:
    """Kill somebody once a checkpoint beyond `after` begins to be made; None: the run ended."""
    deadline = time.monotonic() + PATIENCE
    while newest(folder) <= after:
        if run.poll() is not None:
            return None
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(run.args, PATIENCE)
        time.sleep(0.005)
    time.sleep(chance.random() * 0.3)
    pids = {f"rank {rank}": pid for rank, pid in ranks_started_by(run.pid).items()}
    victims = {**pids, "launcher": run.pid}
    name = chance.choice(sorted(victims))
    in_save = any((folder / "checkpoint").glob(".unfinished*"))
    if run.poll() is not None:
        return None
    try:
        os.kill(victims[name], signal.SIGKILL)
    except ProcessLookupError:
        return None
    return name + (" in a save" if in_save else "")


def orphans(folder: Path) -> list[int]:
    """Processes of the run that still live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


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


def try_way(name: str, changes: dict[str, Any], kills: int, seed: int, base: Path) -> list[Any]:
    """One row of the table."""
    folder = base / name.replace(" ", "-")
    folder.mkdir()
    steps = 4 * kills + 8
    killed = begin(name, changes, steps, folder)
    chance = random.Random(seed)
    done: list[str] = []
    starts = 0
    left_behind = 0
    longest = 0.0
    began = time.monotonic()
    while True:
        starts += 1
        run = start(killed, folder / "log")
        started = time.monotonic()
        try:
            if len(done) < kills:
                victim = wait_and_kill(run, folder / "killed", newest(folder / "killed"), chance)
                longest = max(longest, time.monotonic() - started)
                if victim is not None:
                    done.append(victim)
            code = run.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise Failed(name, f"start {starts} neither ends nor goes on", folder) from None
        time.sleep(0.5)
        deadline = time.monotonic() + 15
        while (alive := orphans(killed)) and time.monotonic() < deadline:
            time.sleep(0.2)
        left_behind += len(alive)
        if code == 0:
            break
        if starts > kills + 5:
            raise Failed(name, f"{starts} starts for {kills} kills", folder)
    in_save = sum("in a save" in victim for victim in done)
    who = ", ".join(
        f"{sum(victim.startswith(one) for victim in done)} {one}"
        for one in ("rank 0", "rank 1", "launcher")
    )
    seconds = f"{time.monotonic() - began:.0f}"
    return [name, steps, len(done), who, in_save, starts, left_behind, verdict_of(folder),
            f"{longest:.0f}", seconds]  # fmt: skip


HEADER = ["way", "steps", "kills", "killed", "in a save", "starts", "processes left behind",
          "parameters at the end", "longest start, seconds", "seconds"]  # fmt: skip


def main() -> None:
    """Try every way and write the table; ways that were tried before on this day are kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--rows", type=Path, help="keep rows here and go on where it stopped")
    options = parser.parse_args()
    rows: dict[str, list[Any]] = {}
    if options.rows and options.rows.exists():
        rows = json.loads(options.rows.read_text())
    with tempfile.TemporaryDirectory(prefix="chaos-") as base:
        for name, changes in WAYS.items():
            if name in rows or (options.only and name != options.only):
                continue
            rows[name] = try_way(name, changes, options.kills, options.seed, Path(base))
            print(rows[name], flush=True)
            if options.rows:
                options.rows.write_text(json.dumps(rows))
    if options.only and not options.rows:
        return
    path = write_record(
        "chaos",
        "Ranks and launchers killed at random, and resumed",
        "python -m benchmarks.faults.chaos",
        table(HEADER, [rows[name] for name in WAYS if name in rows]),
    )
    print(path)


if __name__ == "__main__":
    main()
