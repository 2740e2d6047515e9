"""Folders as runs leave them, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORD: dict[str, Any] = {
    "recall@1": 0.25,
    "recall@10": 0.5,
    "mrr": 0.333,
    "untrained_recall@1": 0.001,
    "untrained_recall@10": 0.01,
    "untrained_mrr": 0.002,
    "pool_size": 10_000,
    "queries": 2_000,
    "peak_bytes": 100 * 2**20,
    "plain_peak_bytes": 250 * 2**20,
    "examples_per_second": 1234.5,
    "steps": 39,
    "world_size": 2,
}
METRICS = [
    {
        "step": step,
        "epoch": 0,
        "loss": 5.0 / step,
        "lr": 1e-4 * step,
        "grad_norm": 2.0,
        "examples_per_second": 1200.0,
        "peak_bytes": 100 * 2**20,
    }
    for step in range(1, 40)
]
CONFIG = {
    "contrastive": {"global_batch": 256},
    "data": {"train_file": "汉语<.tsv"},
    "train": {"seed": 0, "resume": False},
}
EXAMPLE = {"query": "河<b>", "answer": "a river", "rank": 7, "hits": [{"text": "a", "score": 0.5}]}
TIMES: dict[str, Any] = {
    "event": "times",
    "step": 3,
    "ranks": [[100.5, 80.0, 39.0, 29.0, 15.0], [99.25, 78.75, 39.0, 29.0, 15.0]],
}
EVENTS: list[dict[str, Any]] = [
    {
        "event": "start",
        "ranks": 2,
        "environment": {"paddle": "3.3.1"},
        "config": CONFIG,
        "sources": {"train.seed": "line 3"},
    },
    {"event": "said", "text": "12 duplicates removed"},
    {
        "event": "data",
        "train": 5000,
        "valid": 2000,
        "pool": 10_000,
        "words": 800,
        "lengths": {
            "queries": {"counts": [0, 3, 4], "mean": 1.5, "longest": 2, "cut": 4, "unknown": 1}
        },
        "notes": ["12 duplicates removed"],
    },
    {"event": "examples", "when": "untrained", "queries": [EXAMPLE]},
    {"event": "steps", "done": 0, "total": 39},
    TIMES,
    {
        "event": "examples",
        "when": "trained",
        "queries": [{**EXAMPLE, "rank": 1, "hits": [{"text": "a river", "score": 0.9}]}],
    },
    {"event": "end", "why": "finished"},
]


def write_run(
    folder: Path,
    *,
    record: dict[str, Any] | None = RECORD,
    metrics: list[dict[str, Any]] = METRICS,
    events: list[dict[str, Any]] = EVENTS,
) -> Path:
    """A folder with these files; an event happens 10 s after the last."""
    folder.mkdir(parents=True)
    timed = [{"time": 1.7e9 + 10 * number, **event} for number, event in enumerate(events)]
    for name, records in (("metrics.jsonl", metrics), ("events.jsonl", timed)):
        (folder / name).write_text("".join(f"{json.dumps(one)}\n" for one in records))
    if record is not None:
        (folder / "result.json").write_text(json.dumps(record))
    return folder
