"""Two ranks, 64 MiB of parameters, AdamW: a plain chain beside ``offload="ranks"``.

16 Layers of ``Linear(1024, 1024)``, each recomputed and a shard, float32. Bytes are those of
Paddle's allocator above what was there before the model: between two steps, and the peak of the
third step, with one row per rank. Time is the ratio of the CPU time of a step with 64 rows, to the
plain chain with and without recompute, round by round in one run.

    python -m benchmarks.memory.sharding_parameters [--rounds N]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import paddle

from benchmarks.harness.network import loopback
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.record import table, write_record
from paddle_recompute import OffloadSequential, RecomputeConfig, TrainStep, apply_recompute
from paddle_recompute._paddle import memory as _memory

BLOCKS, WIDTH, ROWS, RANKS = 16, 1024, 64, 2
VARIANTS = ("replicated", "on ranks")
WITHOUT = "replicated without recompute"
SHARD = 4 * WIDTH * (WIDTH + 1)
"""Bytes of the parameters of one."""
MIB = 2**20


def adamw(parameters: list[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    """The optimizer, of all or of a shard."""
    return paddle.optimizer.AdamW(1e-4, parameters=parameters)


def step_of(variant: str) -> Callable[[int], float]:
    """Makes a step with a number of rows; a fresh model."""
    paddle.seed(0)
    layers = [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)]
    if variant != "on ranks":
        model: Any = paddle.nn.Sequential(*layers)
        if variant != WITHOUT:
            apply_recompute(model, RecomputeConfig(enable=True, checkpoints=["*"]))
        optimizer: Any = adamw(model.parameters())
    else:
        model = OffloadSequential(layers, num_shards=BLOCKS, offload="ranks")
        optimizer = model.optimizer(adamw)
    step = TrainStep(model, optimizer, loss_fn=lambda m, x: m(x).square().mean())
    return lambda rows: step([paddle.randn([rows, WIDTH])]).loss


def bytes_of(variant: str) -> tuple[int, int]:
    """Bytes between the second and the third step, and the peak of the third."""
    gc.collect()
    before = _memory.current_bytes()
    step = step_of(variant)
    for _ in range(2):
        step(1)
    held = _memory.current_bytes() - before
    _memory.reset_peak()
    step(1)
    return held, _memory.peak_bytes() - before


def measure(rounds: int) -> dict[str, Any]:
    """What one rank measures."""
    found = {variant: bytes_of(variant) for variant in VARIANTS}
    gc.collect()
    steps = {variant: step_of(variant) for variant in (*VARIANTS, WITHOUT)}
    shares: dict[str, list[float]] = {VARIANTS[0]: [], WITHOUT: []}
    for number in range(rounds + 2):
        taken = {}
        for variant, step in steps.items():
            began = time.process_time()
            step(ROWS)
            taken[variant] = time.process_time() - began
        if number >= 2:
            for variant, ratios in shares.items():
                ratios.append(taken[VARIANTS[1]] / taken[variant])
    return {"bytes": found, "shares": shares}


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    found = run_ranks(measure, loopback(RANKS), timeout=900, rounds=arguments.rounds)
    whole = 4 * BLOCKS * SHARD
    formulas = {
        "replicated": (3 * whole // 4, None),
        "on ranks": (3 * whole // 4 // RANKS, whole // RANKS + 2 * SHARD),
    }
    rows = []
    for variant in VARIANTS:
        for place, what in enumerate(("between steps", "peak of a step")):
            most, formula = (
                max(one["bytes"][variant][place] for one in found),
                formulas[variant][place],
            )
            texts = ["", ""]
            if formula is not None:
                texts = [f"{formula / MIB:.1f}", f"{most / formula:.3f}"]
            rows.append([variant, what, f"{most / MIB:.1f}", *texts])
    times = []
    for variant in (VARIANTS[0], WITHOUT):
        shares = [one for rank in found for one in rank["shares"][variant]]
        low, middle, high = statistics.quantiles(shares, n=4)
        times.append(
            f"CPU time of a step, on ranks / {variant}: {middle:.3f} (quartiles {low:.3f} to "
            f"{high:.3f})."
        )
    body = [
        *table(["parameters", "bytes", "MiB per rank", "formula MiB", "measured / formula"], rows),
        "",
        "The formula on n ranks is 12 P / n bytes between steps, and 16 P / n and the parameters "
        "of two shards at the peak. The replicated run has buffers of gradients at its peak.",
        "",
        "Replicated: each Layer is recomputed, as each shard is.",
        "",
        *times,
    ]
    command = "python -m benchmarks.memory.sharding_parameters"
    title = "Parameters, gradients and optimizer state spread over two ranks"
    print(write_record("sharding_parameters", title, command, body).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
