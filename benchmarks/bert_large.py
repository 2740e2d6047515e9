"""How many sequences of 512 tokens of BERT-large fit on a 32 GB card: the arithmetic.

Encoders of two and of three blocks of BERT-large's shape (hidden 1024, 16 heads, feed-forward
4096, vocabulary 30522, 76 masked positions per sequence, AdamW, float32) are measured with batches
of 2, 3 and 4. Peaks are affine in blocks and batch, so they are extended to 24 blocks. Nothing is
tuned to what Paddle has published (14 sequences plain, 53 with recompute, 87 with recompute and
mixed precision, on a V100 of 32 GB), and no GPU is used: kernels there need workspace and keep
other things (a fused attention keeps no scores).

    python -m benchmarks.bert_large
"""

from __future__ import annotations

import json

import paddle

from benchmarks._record import table, write_record
from paddle_recompute.planner import PLAIN, WHOLE, Job, StepCosts, simulate, uniform
from paddle_recompute.planner.step_costs import measure_step

nn = paddle.nn
BLOCKS, LENGTH, MASKED, VOCABULARY = 24, 512, 76, 30522
CARD = 32 * 10**9
DRIVER = 10**9
ROWS = (2, 3, 4)


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


def costs_of(blocks: int, rows: int) -> StepCosts:
    """A step of so many blocks and rows."""
    model = Bert(blocks)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    batch = paddle.randint(0, VOCABULARY, [rows, LENGTH])
    job = Job(model, batch, lambda m, ids: m(ids), optimizer, checkpoints=["encoder.layers.*"])
    held = job.held()
    return measure_step(
        model,
        job.blocks,
        job.step,
        held=held,
        base=sum(held.values()),
        batch=batch,
        options=(PLAIN, WHOLE),
    )


def main() -> None:
    """Measure, extend, write the record."""
    measured = {(blocks, rows): costs_of(blocks, rows) for blocks in (2, 3) for rows in ROWS}
    lines, found = [], {}
    for option, name in ((PLAIN, "plain"), (WHOLE, "all blocks recomputed")):
        peaks = {
            key: simulate(costs, uniform(costs, option)).peak.bytes
            for key, costs in measured.items()
        }

        def at_24(rows: int, peaks: dict[tuple[int, int], int] = peaks) -> int:
            return peaks[2, rows] + (BLOCKS - 2) * (peaks[3, rows] - peaks[2, rows])

        per_row = at_24(4) - at_24(3)
        fixed = at_24(4) - 4 * per_row
        bend = (at_24(4) - at_24(3)) - (at_24(3) - at_24(2))
        rows = (CARD - DRIVER - fixed) // per_row
        found[name] = {"fixed": fixed, "per row": per_row, "rows": rows, "bend": bend}
        lines.append([name, f"{fixed / 1e9:.2f}", f"{per_row / 1e9:.3f}", f"{bend:,}", str(rows)])
    header = ["policy", "fixed, GB", "per sequence, GB", "bend, bytes", "sequences on 32 GB"]
    path = write_record(
        "bert_large",
        "BERT-large at length 512: arithmetic",
        "python -m benchmarks.bert_large",
        [
            *(__doc__ or "").strip().splitlines()[:8],
            "",
            f"Of the card's {CARD / 1e9:.0f} GB, {DRIVER / 1e9:.0f} GB are left to the driver.",
            "",
            *table(header, lines),
            "",
            "Published by Paddle: 14 plain, 53 with recompute, 87 with recompute and float16.",
        ],
    )
    path.with_suffix(".json").write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
