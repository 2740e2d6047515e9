"""Train for hours with faults, and watch memory, threads and descriptors.

    python -m benchmarks.soak --minutes 120      # 2 ranks, 50 saves, 10 faults
    python -m benchmarks.soak --minutes 10

The run is the command itself, with ``--max-restart`` and ``train.resume=auto``. A fault is a rank
killed or stopped and continued, a checkpoint with one changed bit, or SIGTERM to one rank. Between
two faults the figures of each rank are read from /proc: resident memory after a tenth of the time
since its start, and at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks._record import table, write_record
from benchmarks.chaos import COMMON, ROOT, newest
from tests.app.trainer.test_trainer import tiny, write_pairs

SECONDS_OF_A_RUN = 3.0
"""Between two looks."""


def figures(pid: int) -> tuple[float, int, int] | None:
    """Resident MiB, threads, descriptors; None where the process is gone or has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in found:  # its parent has not asked for its code yet
        return None
    return int(found["VmRSS"].split()[0]) / 1024, int(found["Threads"]), descriptors


def ranks_of(folder: Path) -> dict[int, int]:
    """The process of each rank."""
    found = {}
    for path in (folder / "logs").glob("pid.*"):
        try:
            found[int(path.suffix[1:])] = int(path.read_text())
        except (OSError, ValueError):
            continue
    return found


def named(ranks: dict[int, int]) -> list[tuple[str, int]]:
    """The processes with the names of the table."""
    return [(f"rank {rank}", pid) for rank, pid in sorted(ranks.items())]


def hurt(kind: str, folder: Path, chance: random.Random) -> None:
    """One fault."""
    pids = list(ranks_of(folder).values())
    if not pids:
        return
    victim = chance.choice(pids)
    if kind == "a rank killed":
        os.kill(victim, signal.SIGKILL)
    elif kind == "a rank stopped for 3 s":
        os.kill(victim, signal.SIGSTOP)
        time.sleep(3)
        os.kill(victim, signal.SIGCONT)
    elif kind == "SIGTERM to one rank":
        os.kill(victim, signal.SIGTERM)
    else:
        step = newest(folder)
        for file in (folder / "checkpoint" / f"step-{step}").glob("optimizer.safetensors"):
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        os.kill(victim, signal.SIGKILL)


FAULTS = ("a rank killed", "a rank stopped for 3 s", "SIGTERM to one rank", "a damaged checkpoint")


def main() -> None:
    """Run, hurt, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--faults", type=int, default=10)
    options = parser.parse_args()
    seconds = options.minutes * 60
    chance = random.Random(0)
    lives: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as base:
        folder = Path(base)
        write_pairs(folder / "pairs.tsv")
        settings = {**COMMON, "train__max_steps": 10**7, "train__save_every": 500,
                    "train__log_every": 50, "train__output_dir": str(folder / "run")}  # fmt: skip
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(tiny(folder, **settings).to_dict()))
        command = [sys.executable, "-m", "paddle_recompute", "train", "--config", str(config),
                   "--max-restart", "100"]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        began = time.monotonic()
        next_fault = seconds / (options.faults + 1)
        given: list[str] = []
        seen: dict[tuple[str, int], list[tuple[float, float, int, int]]] = {}
        run: subprocess.Popen[bytes] | None = None
        saves: set[str] = set()
        while time.monotonic() - began < seconds:
            if run is None or run.poll() is not None:
                with (folder / "log").open("ab") as log:
                    run = subprocess.Popen(
                        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
            time.sleep(SECONDS_OF_A_RUN)
            saves |= {path.name for path in (folder / "run" / "checkpoint").glob("step-*")}
            now = time.monotonic() - began
            for who, pid in [("launcher", run.pid), *named(ranks_of(folder / "run"))]:
                if (found := figures(pid)) is not None:
                    seen.setdefault((who, pid), []).append((now, *found))
            if len(given) < options.faults and now > next_fault and newest(folder / "run"):
                kind = FAULTS[len(given) % len(FAULTS)]
                hurt(kind, folder / "run", chance)
                given.append(kind)
                print(f"{now:.0f} s, step {newest(folder / 'run')}: {kind}", flush=True)
                next_fault += seconds / (options.faults + 1)
        if run is not None:
            run.terminate()
            run.wait(120)
        code = run.returncode if run is not None else None
        last = newest(folder / "run")
    for (who, _), looks in seen.items():
        settled = looks[len(looks) // 10 + 3 :]
        if len(settled) < 10:
            continue
        first, end = settled[0], settled[-1]
        lives.append(
            {
                "process": who,
                "minutes": f"{(end[0] - first[0]) / 60:.1f}",
                "resident, MiB": f"{first[1]:.1f} to {end[1]:.1f}",
                "growth": f"{(end[1] / first[1] - 1) * 100:+.2f} %",
                "threads": f"{first[2]} to {end[2]}",
                "descriptors": f"{first[3]} to {end[3]}",
            }
        )
    path = write_record(
        "soak",
        f"A soak of {options.minutes:g} minutes on two ranks",
        f"python -m benchmarks.soak --minutes {options.minutes:g} --faults {options.faults}",
        [
            f"{last} steps, {len(saves)} checkpoints seen, {len(given)} faults "
            f"({', '.join(f'{given.count(kind)} x {kind}' for kind in FAULTS)}); the last SIGTERM "
            f"ended the command with code {code}.",
            "",
            "Each line is one process, from when it had settled to its end:",
            "",
            *table(
                ["process", "minutes", "resident, MiB", "growth", "threads", "descriptors"],
                [list(life.values()) for life in lives],
            ),
        ],
    )
    print(path)
    print(path.read_text())


if __name__ == "__main__":
    main()
