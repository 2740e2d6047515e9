"""What ``FLAGS_use_stride_kernel=0``, which runs on a CPU set, does to time, peak and losses.

    python -m benchmarks.stride_kernel            # about six minutes

The shipped configuration for two processes trains with the flag at 1 and at 0, in turn. Time is the
processor time of all processes for a pair of texts: that of a long run less that of a short one, so
that the start and the evaluation fall out. It depends less on what else the machine does than time
on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks._record import RESULTS, table, write_record

ROOT = RESULTS.parent.parent
CONFIG = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"
SHORT, LONG, PAIRS = 8, 32, 256


@dataclass(frozen=True)
class Run:
    """One run of the command: processor seconds, peak of rank 0 in bytes, the losses."""

    processor: float
    peak: int
    losses: tuple[float, ...]


def train(flag: int, steps: int) -> Run:
    """The command, with the flag."""
    with tempfile.TemporaryDirectory(prefix="stride-") as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [
                *(sys.executable, "-m", "paddle_recompute.cli", "train", "--config", CONFIG),
                *(f"train.max_steps={steps}", "train.warmup_steps=4", "train.log_every=1"),
                *("train.eval_before=false", "train.measure_plain=false"),
                f"train.output_dir={folder}/run",
            ],
            cwd=ROOT,
            env={**os.environ, "FLAGS_use_stride_kernel": str(flag), "PYTHONPATH": str(ROOT)},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        steps_of_run = [line for line in map(json.loads, lines) if "step" in line]
    return Run(
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        max(line["peak_bytes"] for line in steps_of_run if "peak_bytes" in line),
        tuple(line["loss"] for line in steps_of_run if "loss" in line),
    )


def main() -> None:
    """Train in turn, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    pairs = (LONG - SHORT) * PAIRS
    rows = []
    ratios = []
    same = True
    for number in range(1, options.rounds + 1):
        runs = {flag: (train(flag, SHORT), train(flag, LONG)) for flag in (1, 0)}
        cost = {
            flag: (long.processor - short.processor) / pairs * 1e3
            for flag, (short, long) in runs.items()
        }
        ratios.append(cost[0] / cost[1])
        same = same and runs[0][1].losses == runs[1][1].losses
        peaks = [f"{runs[flag][1].peak:,}" for flag in (1, 0)]
        rows.append(
            [number, *(f"{cost[flag]:.2f}" for flag in (1, 0)), f"{ratios[-1]:.3f}", *peaks]
        )
        print(rows[-1], flush=True)
    path = write_record(
        "stride_kernel",
        "FLAGS_use_stride_kernel on a CPU",
        f"python -m benchmarks.stride_kernel --rounds {options.rounds}",
        [
            f"{CONFIG}, 2 ranks. Median ratio: {statistics.median(ratios):.3f}. "
            f"Losses of {LONG} steps: {'the same bits' if same else 'DIFFERENT'}.",
            "",
            *table(
                [
                    "round",
                    "flag 1: CPU ms per pair",
                    "flag 0",
                    "ratio",
                    "flag 1: peak, bytes",
                    "flag 0",
                ],
                rows,
            ),
        ],
    )
    print(path)
    print(path.read_text())


if __name__ == "__main__":
    main()
