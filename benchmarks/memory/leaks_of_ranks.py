"""What chains with ``offload="ranks"`` leave on two ranks when they are made, trained and dropped.

    python -m benchmarks.memory.leaks_of_ranks [--models N]

Each model is a chain of four blocks with AdamW in a `TrainStep`, which makes one step. Counted on
each rank, after the first 20 models and after all: threads of the system, descriptors, bytes of
Paddle's allocator, and objects of the garbage collector as in `benchmarks.memory.leaks`.
"""

from __future__ import annotations

import argparse
import os
import sys

import paddle

from benchmarks.harness.network import loopback
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.record import table, write_record
from benchmarks.memory.leaks import _now
from paddle_recompute import OffloadSequential, TrainStep

WARM_UP, RANKS, WIDTH = 20, 2, 16
COUNTED = ("threads", "descriptors", "bytes", "objects")


def made_and_dropped() -> None:
    """One model; nothing of it is referred to afterwards."""
    layers = [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    chain = OffloadSequential(layers, num_shards=4, offload="ranks")
    optimizer = chain.optimizer(lambda p: paddle.optimizer.AdamW(1e-3, parameters=p))
    step = TrainStep(chain, optimizer, loss_fn=lambda model, x: model(x).square().mean())
    step([paddle.ones([2, WIDTH])])


def measure(models: int) -> list[list[int]]:
    """The counts after `WARM_UP` models and after all, on one rank."""
    counts = []
    for number in range(1, models + 1):
        made_and_dropped()
        if number in (WARM_UP, models):
            system = [len(os.listdir(f"/proc/self/{one}")) for one in ("task", "fd")]
            counts.append([*system, *_now()])
    return counts


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=int, default=100 + WARM_UP)
    models = parser.parse_args().models
    found = run_ranks(measure, loopback(RANKS), timeout=900, models=models)
    rows = [
        [rank, name, first, last, last - first]
        for rank, (before, after) in enumerate(found)
        for name, first, last in zip(COUNTED, before, after, strict=True)
    ]
    header = ["rank", "what", f"after {WARM_UP} models", f"after {models}", "more"]
    command, title = "python -m benchmarks.memory.leaks_of_ranks", 'Chains with `offload="ranks"`'
    write_record("leaks_of_ranks", f"{title}, made and dropped", command, table(header, rows))
    # Of an object that is gone, a reference may wait for the next look through them.
    if any(row[-1] > (models // 2 if row[1] == "objects" else 0) for row in rows):
        sys.exit("what the chains leave grows")


if __name__ == "__main__":
    main()
