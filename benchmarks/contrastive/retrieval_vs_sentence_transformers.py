"""The same training for search, as a user writes it with sentence-transformers and with us.

Both programs (`_search_sentence_transformers`, `_search_ours`) train an encoder of the same shape
from its own random weights: the same 20,000 pairs of CC-CEDICT in the same order, tokenizer,
batch, steps, temperature, AdamW, dropout 0.1, cached loss with chunks of the same size. The loss is
that of query to positive only (`symmetric: false`), sentence-transformers' default. The vectors of
both are measured by the same function.

    make bench-retrieval_vs_sentence_transformers [ARGS="--steps 78 --seeds 0 1 2"]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contrastive._side_by_side_programs import Plan
from benchmarks.harness.record import table, torch_python, write_record
from paddle_recompute.app.config import default_cache_dir, load_config
from paddle_recompute.app.data import prepare_data
from paddle_recompute.app.retrieval import retrieval_metrics

CONFIG = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"
PAIRS, HELD_OUT, VOCABULARY = 20_000, 1000, 4000
METRICS = ("ndcg@10", "recall@10")
PROGRAMS = {"theirs": "_search_sentence_transformers", "ours": "_search_ours"}
CALLED = {"theirs": "sentence-transformers", "ours": "paddle_recompute"}


def prepare(cache: Path, steps: int, seeds: list[int]) -> Plan:
    """Write what both programs read."""
    changes = [f"data.valid_pairs={HELD_OUT}", f"data.vocab_size={VOCABULARY}"]
    data = prepare_data(load_config(CONFIG, changes), 0, lambda: None)
    for name, pairs in (("train", data.train[:PAIRS]), ("test", data.valid)):
        sides = [pair.query for pair in pairs], [pair.positive for pair in pairs]
        (cache / f"{name}.json").write_text(json.dumps(sides), encoding="utf-8")
    tokenizer = cache / "vocabulary.json"
    data.tokenizer.save(tokenizer)
    shape = {
        "num_layers": 2,
        "num_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 32,
    }
    plan = Plan(
        folder=str(cache),
        tokenizer=str(tokenizer),
        shape=shape,
        batch=256,
        steps=steps,
        chunk_size=64,
        max_tokens=32,
        temperature=0.05,
        learning_rate=2e-3,
        seeds=seeds,
    )
    (cache / "plan.json").write_text(json.dumps(dataclasses.asdict(plan)), encoding="utf-8")
    return plan


def user_lines(module: str) -> int:
    """Lines of a program that are no blank lines, between its two marks."""
    text = (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    own = text.partition("# user code\n")[2].partition("# end of user code")[0]
    lines = [line for line in own.splitlines() if not line.startswith("from benchmarks")]
    return sum(bool(line.strip()) for line in lines)


def measured(cache: Path, name: str, seeds: list[int]) -> dict[str, list[float]]:
    """Each metric of each seed."""
    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for seed in seeds:
        query, pool = (np.load(cache / f"{name}-{seed}-{side}.npy") for side in ("query", "pool"))
        metrics = retrieval_metrics(query, pool, np.arange(len(query)))
        for metric in METRICS:
            found[metric].append(metrics[metric])
    return found


def main() -> None:
    """Run both programs and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=78, help="78: each pair once")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    cache = default_cache_dir().expanduser().resolve() / "retrieval_vs_sentence_transformers"
    cache.mkdir(parents=True, exist_ok=True)
    plan = prepare(cache, options.steps, options.seeds)
    python = {"theirs": torch_python(), "ours": sys.executable}
    # At the same time, one thread each: whatever else the machine does, it does to both.
    started = {
        name: subprocess.Popen(
            [python[name], "-m", f"benchmarks.contrastive.{module}", str(cache)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for name, module in PROGRAMS.items()
    }
    if any(process.wait() for process in started.values()):
        raise SystemExit("a program failed; its error stands above")
    rows, versions = [], []
    for name, module in PROGRAMS.items():
        about: dict[str, Any] = json.loads((cache / f"{name}.json").read_text(encoding="utf-8"))
        versions += [f"{library} {version}" for library, version in about["versions"].items()]
        rate = [plan.batch * plan.steps / run["cpu_seconds"] for run in about["runs"]]
        metrics = [
            f"**{statistics.mean(values):.4f}** ({', '.join(f'{one:.4f}' for one in values)})"
            for values in measured(cache, name, plan.seeds).values()
        ]
        peak = f"{about['runs'][0]['peak'] / 2**20:.0f}"
        rows.append(
            (CALLED[name], *metrics, f"{statistics.median(rate):.0f}", peak, user_lines(module))
        )
    header = ["library", *(f"{name}: mean (each seed)" for name in METRICS)]
    header += ["examples per CPU second", "peak, MiB", "lines of user code"]
    body = [
        *(__doc__ or "").split("\n\n")[1].splitlines(),
        "",
        f"- {', '.join(versions)}; one thread each, both at the same time",
        f"- {plan.steps} steps of {plan.batch} pairs; 2 layers, hidden 64; {HELD_OUT} held-out "
        f"queries, each among {HELD_OUT} positives",
        "- peak: rise of resident memory in the first training (VmHWM), the model included",
        "",
        *table(header, rows),
    ]
    command = "make bench-retrieval_vs_sentence_transformers"
    arguments = f' ARGS="{" ".join(sys.argv[1:])}"' if sys.argv[1:] else ""
    title = "A training for search: sentence-transformers and ours"
    write_record("retrieval_vs_sentence_transformers", title, f"{command}{arguments}", body)


if __name__ == "__main__":
    main()
