"""Two rounds of training for search on real text: the second with mined hard negatives.

The data are the Chinese and English sentences of LibreOffice (`_libreoffice`); whole pages are held
out. Round one trains an encoder from random weights. `paddle-recompute mine` finds negatives of the
training pairs with it. Round two continues from its weights with them. The control continues from
the same weights for as many steps without negatives. The commands are those that a user types;
nothing is tuned on the held-out pairs.

    make retrieval-demo [ARGS="--seeds 0 1 2 --steps 60"]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.contrastive._libreoffice import mine_libreoffice, read_mined, split_by_page
from benchmarks.harness.record import table, write_record
from paddle_recompute.app.config import default_cache_dir
from paddle_recompute.app.data import Pair
from paddle_recompute.app.data._cache_folder import write_whole

METRICS = ("ndcg@10", "recall@10")
BATCH, HARD_NEGATIVES = 256, 1
MAX_CHARACTERS, MAX_WORDS = 24, 14
HELD_OUT, POOL = 2000, 10_000
RATES = {"first": 3e-3, "second": 1e-3}
MINED = ("--num-negatives", "4", "--ranks", "1:50", "--relative-margin", "0.05")


ARMS = {"round two, mined negatives": HARD_NEGATIVES, "control, no negatives": 0}
"""What follows round one, and how many hard negatives each pair has there."""


def write_data(cache: Path) -> tuple[Path, Path, str]:
    """The files of training and held-out pairs, and what they hold."""
    found = read_mined(mine_libreoffice(cache))
    short = [
        one
        for one in found
        if len(one.pair.query) <= MAX_CHARACTERS and len(one.pair.positive.split()) <= MAX_WORDS
    ]
    split = split_by_page(short, held_out=HELD_OUT, seed=0)
    paths = cache / "train.jsonl", cache / "test.jsonl"
    for path, pairs in zip(paths, (split.train, split.test), strict=True):
        write_whole(path, "".join(map(_line, pairs)))
    about = (
        f"{len(split.train)} pairs to train on, {len(split.test)} held out to report, whole pages; "
        f"no text is there twice; each query searches among {POOL} candidates, the held-out "
        "positives and training positives"
    )
    return *paths, about


def _line(pair: Pair) -> str:
    return json.dumps({"query": pair.query, "positive": pair.positive}, ensure_ascii=False) + "\n"


def config(folder: Path, train: Path, test: Path, *, steps: int, seed: int) -> dict[str, Any]:
    """The configuration that all runs have in common."""
    return {
        "model": {
            "preset": "tiny",
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "intermediate_size": 128,
            "max_position_embeddings": 64,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "pooling": "mean",
        },
        "recompute": {"enable": False},
        "contrastive": {"global_batch": BATCH, "mask_false_negatives": True},
        "data": {
            "source": "files",
            "train_file": str(train),
            "valid_file": str(test),
            "cache_dir": str(folder.parent / "cache"),
            "max_query_tokens": 24,
            "max_positive_tokens": 24,
            "pool_size": POOL,
            "vocab_size": 4000,
        },
        "train": {
            "max_steps": steps,
            "learning_rate": RATES["first"],
            "warmup_steps": steps // 10,
            "clip_grad_norm": 1.0,
            "seed": seed,
            "eval_before": False,
            "measure_plain": False,
            "output_dir": str(folder),
            "resume": "auto",
        },
        "launch": {"num_ranks": 1, "device": "cpu"},
    }


def command(*arguments: str) -> None:
    """Run ``paddle-recompute``."""
    run = subprocess.run(
        [sys.executable, "-m", "paddle_recompute", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode != 0:
        raise SystemExit(f"paddle-recompute {' '.join(arguments)} failed:\n{run.stderr[-3000:]}")


def train(found: dict[str, Any]) -> dict[str, Any]:
    """Train, or read what an earlier call has trained; returns the run's record."""
    folder = Path(found["train"]["output_dir"])
    file = folder.with_suffix(".yaml")
    text, result = yaml.safe_dump(found), folder / "result.json"
    if not (result.exists() and file.read_text(encoding="utf-8") == text):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        command("train", "--config", str(file))
    return dict(json.loads(result.read_text(encoding="utf-8")))


def one_seed(work: Path, files: tuple[Path, Path], steps: int, seed: int) -> dict[str, Any]:
    """Round one, mining, round two and the controls: what each has reached."""
    folder = work / f"seed-{seed}"
    first = config(folder / "first", *files, steps=steps, seed=seed)
    done = {"round one": train(first)}
    mined = folder / "mined.jsonl"
    pool = work / "pool.txt"
    lines = files[0].read_text(encoding="utf-8").splitlines()
    write_whole(pool, "".join(json.loads(line)["positive"] + "\n" for line in lines))
    model = ("--model", str(folder / "first"))
    data = ("--pairs", str(files[0]), "--pool", str(pool), "--output", str(mined))
    command("mine", *model, *data, *MINED)
    counts = json.loads(mined.with_name(f"{mined.name}.json").read_text(encoding="utf-8"))
    checkpoint = folder / "first" / "checkpoint" / f"step-{steps}"
    for arm, negatives in ARMS.items():
        name = arm.replace(", ", "-").replace(" ", "-")
        # Another order of the pairs than in round one, the same one in all arms.
        given = config(folder / name, *files, steps=steps, seed=seed + 100)
        given["train"]["learning_rate"] = RATES["second"]
        given["model"]["init_from"] = str(checkpoint / "model.safetensors")
        given["data"]["tokenizer"] = str(checkpoint / "tokenizer.json")
        if negatives:
            given["data"]["train_file"] = str(mined)
            given["contrastive"] |= {"hard_negatives": negatives, "fill": "random"}
        done[arm] = train(given)
    return {"runs": done, "mined": counts}


def body(seeds: dict[int, dict[str, Any]], steps: int, about: str) -> list[str]:
    """The record."""
    rows = []
    for name in next(iter(seeds.values()))["runs"]:
        runs = [one["runs"][name] for one in seeds.values()]
        cells = []
        for metric in METRICS:
            values = [run[metric] for run in runs]
            cells.append(
                f"**{statistics.mean(values):.4f}** ({', '.join(f'{x:.4f}' for x in values)})"
            )
        rows.append((name, runs[0]["steps"], *cells))
    header = ("training", "steps", *(f"{name}: mean (each seed)" for name in METRICS))
    mined = [one["mined"] for one in seeds.values()]
    return [
        *(__doc__ or "").split("\n\n")[1].splitlines(),
        "",
        f"- data: {about}",
        f"- encoder: 2 layers, hidden 64, no dropout; {BATCH} pairs per step; AdamW, peak learning "
        f"rate {RATES['first']} in round one and {RATES['second']} after it",
        f"- mine: `{' '.join(MINED)}`; each pair gets {HARD_NEGATIVES} of its negatives per epoch, "
        "`fill: random`, `mask_false_negatives: true`",
        f"- pairs with 0, 1, ... mined negatives: {', '.join(str(m['lines_with']) for m in mined)}",
        "",
        *table(header, rows),
        "",
        f"Round two minus the control: {_gains(seeds)}. Each seed has its own weights, order of "
        "the pairs and draw of negatives. A step of round two encodes "
        f"{1 + HARD_NEGATIVES / 2:g} times the texts of a step of the control.",
    ]


def _gains(seeds: dict[int, dict[str, Any]]) -> str:
    both = [[one["runs"][arm] for arm in ARMS] for one in seeds.values()]
    found = {name: ", ".join(f"{a[name] - b[name]:+.4f}" for a, b in both) for name in METRICS}
    return "; ".join(f"{name} {values}" for name, values in found.items())


def main() -> None:
    """Train everything and write the record; a second start continues the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="of round one, and of round two")
    parser.add_argument("--cache", type=Path, default=default_cache_dir() / "retrieval_demo")
    options = parser.parse_args()
    cache = options.cache.expanduser().resolve()
    cache.mkdir(parents=True, exist_ok=True)
    *files, about = write_data(cache)
    seeds = {}
    for seed in options.seeds:
        began = time.perf_counter()
        work = cache / f"steps-{options.steps}"
        seeds[seed] = one_seed(work, (files[0], files[1]), options.steps, seed)
        for name, run in seeds[seed]["runs"].items():
            print(f"seed {seed} {name}: nDCG@10 {run['ndcg@10']:.4f}", flush=True)
        print(f"seed {seed}: {time.perf_counter() - began:.0f} s", flush=True)
    arguments = f' ARGS="{" ".join(sys.argv[1:])}"' if sys.argv[1:] else ""
    path = write_record(
        "retrieval_demo",
        "Two rounds of training for search, the second with mined negatives",
        f"make retrieval-demo{arguments}",
        body(seeds, options.steps, about),
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
