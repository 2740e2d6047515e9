"""The CPU time of a training step: torch's beside.

The encoder of fleet_configs/contrastive_ernie-tiny_2cpu.yaml, 256 pairs of up to 10 and 18 tokens
of random lengths, AdamW, one thread, the same batch for all. The plain step keeps the graph of all
pairs. The cached step is `GradCache` with chunks of 1,024 tokens, and the
`CachedMultipleNegativesRankingLoss` of sentence-transformers with chunks of 57 pairs, which are at
most as many tokens. Ours runs with the settings of `use_cpu_settings` and without. Each process
runs one step in turn; a ratio is of two steps of one round.

    make bench-cpu_step [ARGS="--rounds N --pairs N"]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.record import ratios, table, write_record
from paddle_recompute import load_config
from paddle_recompute._paddle.cpu_settings import SWITCH

ROOT = Path(__file__).parents[2]
TORCH = ROOT / ".venv-torch" / "bin" / "python"
CONFIG = ROOT / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml"
PAIRS, ROUNDS, WARM_UP, CHUNK_TOKENS = 256, 9, 2, 1024
WAYS = ("plain", "cached")


class Side:
    """A process that makes one step for each line that it reads."""

    def __init__(self, python: str, module: str, plan: str, **environment: str) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.speed.{module}", plan],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        )

    def seconds(self, step: str) -> float:
        """CPU seconds of one `step`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(step, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side of the benchmark ended with {self._process.wait()}")
        return float(line)

    def end(self) -> None:
        """Let the process end."""
        self._process.communicate()


def plan_of(pairs: int) -> dict[str, Any]:
    """What both sides read: dimensions, and token ids in which 0 is padding."""
    config = load_config(CONFIG)
    draw, batch = np.random.default_rng(0), []
    for longest in (config.data.max_query_tokens, config.data.max_positive_tokens):
        lengths = draw.integers(longest // 3, longest + 1, pairs)
        ids = draw.integers(5, config.data.vocab_size, (pairs, longest))
        batch.append((ids * (np.arange(longest) < lengths[:, None])).tolist())
    names = ("hidden_size", "intermediate_size", "max_position_embeddings", "num_heads",
             "num_layers", "pooling")  # fmt: skip
    return {
        "model": {name: getattr(config.model, name) for name in names},
        "words": config.data.vocab_size,
        "temperature": config.contrastive.temperature,
        "batch": batch,
        "chunk_tokens": CHUNK_TOKENS,
        "chunk_size": max(1, CHUNK_TOKENS // config.data.max_positive_tokens),
    }


def main() -> None:
    """Measure, and write the record; with other pairs or rounds, print the tables alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    args = parser.parse_args()
    plan = json.dumps(plan_of(args.pairs))
    python = os.environ.get("TORCH_PYTHON", str(TORCH))
    sides = {
        "ours": Side(sys.executable, "_cpu_step_ours", plan),
        "ours without settings": Side(sys.executable, "_cpu_step_ours", plan, **{SWITCH: "0"}),
        "torch": Side(python, "_cpu_step_theirs", plan),
    }
    body = [*(__doc__ or "").split("\n\n")[1].splitlines(), ""]
    for way in WAYS:
        seconds: dict[str, list[float]] = {}
        for number in range(WARM_UP + args.rounds):
            for name, side in sides.items():
                found = side.seconds(way)
                if number >= WARM_UP:
                    seconds.setdefault(name, []).append(found)
        to_torch = ratios(seconds, "torch")
        rows = [
            (
                name,
                f"{min(values) * 1e3:.0f}",
                "{:.2f} ({:.2f} to {:.2f})".format(*to_torch[name]),
            )
            for name, values in seconds.items()
        ]
        body += [
            f"## The {way} step",
            "",
            *table(("step", "CPU ms, least", "of torch's"), rows),
            "",
        ]
    for side in sides.values():
        side.end()
    if (args.rounds, args.pairs) != (ROUNDS, PAIRS):
        print("\n".join(body))
        return
    title = "The CPU time of a training step, torch's beside"
    path = write_record("cpu_step", title, "make bench-cpu_step", body)
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
