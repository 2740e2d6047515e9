"""Whole runs by the launcher, as of ``make train``: plain, stage 1, stage 3, with equal losses.

The configuration is ``fleet_configs/contrastive_ernie-tiny_2cpu.yaml`` with the changes of
`CHANGES`: more parameters, fewer steps. Bytes are of each rank: the largest peak of a step in
Paddle's allocator, and the largest resident set of the process since the first step began. The
losses and gradient norms of all steps must be equal to the last bit, or the benchmark ends with an
error.

    python -m benchmarks.correctness.sharding_runs
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.record import table, write_record
from benchmarks.harness.resident import resident
from paddle_recompute.app.config import Config, load_config
from paddle_recompute.app.launch import launch

FILE = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"
CHANGES = [
    *("model.num_layers=8", "model.hidden_size=256", "model.intermediate_size=1024"),
    *(
        "contrastive.global_batch=32",
        "data.vocab_size=2000",
        "data.pool_size=200",
        "data.valid_pairs=200",
    ),
    *(
        "train.max_steps=10",
        "train.learning_rate=1e-4",
        "train.warmup_steps=2",
        "train.log_every=1",
    ),
    *("train.eval_before=false", "train.measure_plain=false", "train.resume=false"),
]
WAYS = {
    "plain": [],
    "stage 1": ["strategy.sharding=true"],
    "stage 3": ["recompute.offload_parameters=ranks", "recompute.num_shards=8"],
}
MIB = 2**20


def config_of(way: str, folder: str) -> Config:
    """The configuration of one run, whose output is in `folder`."""
    return load_config(FILE, [*CHANGES, *WAYS[way], f"train.output_dir={folder}"])


def train(way: str, folder: str) -> None:
    """What a rank does: train, and write its bytes into `folder`."""
    import paddle.distributed as dist

    from paddle_recompute._paddle import memory
    from paddle_recompute.app.trainer import Trainer
    from paddle_recompute.app.trainer.loop import Callback, Run

    class Peaks(Callback):
        peak = parameters = resident = 0

        def on_start(self, run: Run) -> None:
            Path("/proc/self/clear_refs").write_text("5")  # starts the peak anew

        def after_step(self, run: Run) -> None:
            self.peak = max(self.peak, memory.peak_bytes())
            self.resident = resident("VmHWM")
            self.parameters = sum(4 * int(p.size) for p in run.model.parameters())

    peaks = Peaks()
    Trainer(config_of(way, folder), callbacks=[peaks]).run()
    found = {name: getattr(peaks, name) for name in ("parameters", "peak", "resident")}
    (Path(folder) / f"bytes.{dist.get_rank()}.json").write_text(json.dumps(found))


def run(way: str, folder: Path) -> tuple[list[Any], list[dict[str, int]]]:
    """Step, loss and gradient norm of each step, and the bytes of each rank."""
    config = config_of(way, str(folder))
    launch(config, ["-m", "benchmarks.correctness.sharding_runs", "--rank", way, str(folder)])
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    numbers = [(one["step"], one["loss"], one["grad_norm"]) for one in records]
    files = (folder / f"bytes.{rank}.json" for rank in range(config.world_size))
    return numbers, [json.loads(file.read_text()) for file in files]


def main() -> None:
    """Train in each way, and write the record."""
    if sys.argv[1:2] == ["--rank"]:
        return train(*sys.argv[2:])
    with tempfile.TemporaryDirectory() as folder:
        found = {way: run(way, Path(folder) / way.replace(" ", "-")) for way in WAYS}
    plain = found["plain"][0]
    for way, (numbers, _) in found.items():
        if not numbers or numbers != plain:
            raise SystemExit(f"{way} has not the losses of the plain run: {numbers} and {plain}")
    rows = [
        [way, rank, plain[-1][1], *(f"{one[what] / MIB:.1f}" for what in ("peak", "resident"))]
        for way, (_, ranks) in found.items()
        for rank, one in enumerate(ranks)
    ]
    parameters = found["plain"][1][0]["parameters"]
    body = [
        *table(["run", "rank", "last loss", "peak MiB of a step", "resident set MiB"], rows),
        "",
        f"{len(plain)} steps with {parameters / MIB:.1f} MiB of parameters. Losses and gradient "
        "norms of all steps are equal to the last bit. The resident set is the largest of the "
        "process in the steps, with Python, Paddle and data.",
        "",
        f"Of `{FILE}`, with {', '.join(f'`{change}`' for change in CHANGES)}; stage 1 with "
        f"`{WAYS['stage 1'][0]}`, stage 3 with {' and '.join(f'`{o}`' for o in WAYS['stage 3'])}.",
    ]
    title = "Whole runs on two ranks: plain, stage 1, stage 3"
    write_record("sharding_runs", title, "make bench-sharding_runs", body)


if __name__ == "__main__":
    main()
