"""What both programs of retrieval_vs_sentence_transformers share; imports no framework."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.resident import resident


@dataclass(frozen=True)
class Plan:
    """The settings of both programs; `folder` holds the texts, ``train.json`` and ``test.json``."""

    folder: str
    tokenizer: str
    shape: dict[str, Any]
    batch: int
    steps: int
    chunk_size: int
    max_tokens: int
    temperature: float
    learning_rate: float
    seeds: list[int]

    def texts(self, name: str) -> list[list[str]]:
        """The queries and the positives (``train``), or the queries and the pool (``test``)."""
        sides = json.loads((Path(self.folder) / f"{name}.json").read_text(encoding="utf-8"))
        return [list(side) for side in sides]

    def batches(self, seed: int) -> Iterator[tuple[list[str], list[str]]]:
        """The same pairs in the same order for both programs."""
        queries, positives = self.texts("train")
        random, order = np.random.default_rng(seed), np.empty(0, np.int64)
        for _ in range(self.steps):
            if len(order) < self.batch:
                order = random.permutation(len(queries))
            rows, order = order[: self.batch], order[self.batch :]
            yield [queries[row] for row in rows], [positives[row] for row in rows]


def report(
    folder: Path, name: str, train: Callable[..., Any], plan: Plan, versions: dict[str, str]
) -> None:
    """Train with each seed; write the vectors of the test texts, the CPU seconds and the peak."""
    found = []
    for seed in plan.seeds:
        before, began, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
        encode = train(plan, seed)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        peak = resident("VmHWM") - before
        for side, texts in zip(("query", "pool"), plan.texts("test"), strict=True):
            np.save(folder / f"{name}-{seed}-{side}.npy", np.asarray(encode(texts)))
        found.append({"seconds": seconds, "cpu_seconds": cpu, "peak": peak})
    result = {"versions": versions, "runs": found}
    (folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
