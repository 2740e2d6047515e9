"""How many sequences of 512 tokens of BERT-large fit on a 32 GB card: the arithmetic.

A step of BERT-large (24 blocks, hidden 1024, 16 heads, feed-forward 4096, vocabulary 30522, 76
masked positions per sequence, AdamW, float32) is probed with 1, 2 and 3 sequences. The probe runs
the blocks under ``no_grad`` and measures one call of each kind, so it needs no card. Each byte
count of the step is extended to more sequences, and the peak is simulated there: these are the
functions behind ``estimate(batch_size=...)``. Nothing is tuned to what Paddle has published (14
sequences plain, 53 with recompute, 87 with recompute and mixed precision, on a V100 of 32 GB). No
GPU is used: its kernels need workspace and keep other things (a fused attention keeps no scores).

    python -m benchmarks.bert_large
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

import paddle

from benchmarks._record import table, write_record
from paddle_recompute.planner import (
    PLAIN,
    WHOLE,
    Job,
    Timeline,
    extrapolated,
    simulate,
    uniform,
)
from paddle_recompute.planner.batch_size import with_rows

nn = paddle.nn
BLOCKS, LENGTH, MASKED, VOCABULARY = 24, 512, 76, 30522
CARD = 32 * 10**9
DRIVER = 10**9
ROWS = (1, 2, 3)


class Bert(nn.Layer):
    """Embedding, blocks, and the loss of masked words."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, 1024)
        self.position = nn.Embedding(LENGTH, 1024)
        block = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.1, activation="gelu")
        self.encoder = nn.TransformerEncoder(block, blocks)
        self.dense = nn.Linear(1024, 1024)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        hidden = self.word(ids) + self.position(paddle.arange(LENGTH))
        masked = self.encoder(hidden)[:, :MASKED]
        scores = paddle.matmul(self.dense(masked), self.word.weight, transpose_y=True)
        target = ids[:, :MASKED]
        return nn.functional.cross_entropy(scores.reshape([-1, VOCABULARY]), target.reshape([-1]))


def job_of(rows: int) -> Job:
    """A step of so many sequences."""
    paddle.seed(0)
    model = Bert(BLOCKS)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    batch = paddle.randint(0, VOCABULARY, [rows, LENGTH])
    return Job(model, batch, lambda m, ids: m(ids), optimizer, checkpoints=["encoder.layers.*"])


def most_rows(peak: Callable[[int], int]) -> int:
    """The most rows whose peak is within the card."""
    low, high = 0, 1024
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= CARD - DRIVER else (low, middle)
    return low


def main() -> None:
    """Measure, extend, write the record."""
    job = job_of(max(ROWS))
    began = time.perf_counter()
    probes = {
        rows: replace(job, batch=with_rows(job.batch, rows)).measure(
            options=(PLAIN, WHOLE), only_bytes=True
        )
        for rows in ROWS
    }
    seconds = time.perf_counter() - began
    lines, found = [], {}
    for option, name in ((PLAIN, "plain"), (WHOLE, "all blocks recomputed")):

        def step(rows: int, option: str = option) -> Timeline:
            costs = extrapolated(probes, rows)
            return simulate(costs, uniform(costs, option))

        rows = most_rows(lambda rows, step=step: step(rows).peak.bytes)  # type: ignore[misc]
        peak, at_16 = step(rows).peak, step(16).peak.bytes
        found[name] = {"rows": rows, "peak": peak.bytes, "binds": peak.where, "at 16": at_16}
        per_row = (step(rows).peak.bytes - step(rows - 4).peak.bytes) / 4
        numbers = [
            f"{at_16 / 1e9:.2f}",
            f"{per_row / 1e9:.3f}",
            str(rows),
            f"{peak.bytes / 1e9:.2f}",
        ]
        lines.append([name, *numbers, peak.where])
    header = ["policy", "peak of 16 sequences, GB", "per sequence, GB", "sequences on 32 GB"]
    header += ["peak, GB", "binds"]
    held = sum(probes[1].held.values()) - probes[1].held["batch"]
    path = write_record(
        "bert_large",
        "BERT-large at length 512: arithmetic",
        "python -m benchmarks.bert_large",
        [
            *(__doc__ or "").strip().splitlines()[:9],
            "",
            f"Of the card's {CARD / 1e9:.0f} GB, {DRIVER / 1e9:.0f} GB are left to the driver. "
            f"Parameters and moments are {held / 1e9:.2f} GB. The probes took {seconds:.0f} s.",
            "",
            *table(header, lines),
            "",
            "Published by Paddle: 14 plain, 53 with recompute, 87 with recompute and float16.",
            "The plain figures agree. The arithmetic allows more with recompute than was "
            "published; what limited that run is not known.",
        ],
    )
    path.with_suffix(".json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
