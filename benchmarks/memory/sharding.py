"""Two ranks, 64 MiB of parameters, AdamW: the plain optimizer beside `ShardedOptimizer`.

16 blocks of ``Linear(1024, 1024)``, each recomputed, batch 64 per rank, float32, clipping.
Bytes are those of Paddle's allocator above what was there before the model: the peak of the third
step, and that of its update. Time is the ratio within a round of one step of each variant, in one
run; that of CPU time counts all threads of a rank. With ``--mbit``, the ranks are in two network
namespaces with a link of that rate, and time by the clock is measured too; this needs root and
iproute2.

    python -m benchmarks.memory.sharding [--rounds N] [--mbit RATE]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import paddle

from benchmarks.harness.network import loopback, rate_limited, require_root_and_iproute2
from benchmarks.harness.ranks import run_ranks
from benchmarks.harness.record import table, write_record
from paddle_recompute import (
    GradientSync,
    RecomputeConfig,
    ShardedOptimizer,
    TrainStep,
    apply_recompute,
)
from paddle_recompute._paddle import memory as _memory

BLOCKS, WIDTH, ROWS, RANKS = 16, 1024, 64, 2
VARIANTS = ("replicated", "sharded")
MIB = 2**20
FORMULAS = (
    "The formula is 8 P bytes for P parameters and gradients of float32, and 8 bytes for each "
    "parameter that the rank owns. At most: 8 P + 8 P / n on n ranks, and the largest parameter."
)


def adamw(parameters: list[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    """The optimizer, of all or of a part."""
    return paddle.optimizer.AdamW(1e-4, parameters=parameters)


def model_and_optimizer(variant: str) -> tuple[paddle.nn.Layer, Any]:
    """A fresh model and its optimizer."""
    paddle.seed(0)
    layers = [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)]
    model = paddle.nn.Sequential(*layers)
    apply_recompute(model, RecomputeConfig(enable=True, checkpoints=["*"]))
    if variant == "replicated":
        return model, adamw(model.parameters())
    return model, ShardedOptimizer(adamw, model)


def bytes_of(variant: str) -> dict[str, int]:
    """Peak bytes of the third step and of its update; bytes of the parameters, of the largest of
    them, and of those whose moments this rank has.
    """
    gc.collect()  # what the variant before has left
    before = _memory.current_bytes()
    model, optimizer = model_and_optimizer(variant)
    sync = GradientSync(model, mode="fused")
    peak = step = 0
    for _ in range(3):
        _memory.reset_peak()
        with sync.last_backward():
            model(paddle.randn([ROWS, WIDTH])).square().mean().backward()
        step = _memory.peak_bytes() - before
        _memory.reset_peak()
        optimizer.step()
        peak = _memory.peak_bytes() - before
        optimizer.clear_grad(set_to_zero=False)
    sizes = {one.name: int(one.size * one.element_size()) for one in model.parameters()}
    owned = getattr(optimizer, "owned", sizes)
    return {
        "peak": peak,
        "step": max(step, peak),
        "parameters": sum(sizes.values()),
        "largest": max(sizes.values()),
        "owned": sum(sizes[name] for name in owned),
    }


def seconds_of(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU seconds, seconds) of the second of two steps of each variant, round by round."""
    steps: dict[str, Callable[[], Any]] = {}
    for variant in VARIANTS:
        model, optimizer = model_and_optimizer(variant)
        step = TrainStep(
            model,
            optimizer,
            loss_fn=lambda m, x: m(x).square().mean(),
            clip_grad_norm=1.0,
        )
        steps[variant] = lambda step=step: step([paddle.randn([ROWS, WIDTH])]).loss
    found: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    for number in range(rounds + 2):
        for variant, step in steps.items():
            step()
            cpu, clock = time.process_time(), time.perf_counter()
            step()
            if number >= 2:
                taken = time.process_time() - cpu, time.perf_counter() - clock
                found[variant].append(taken)
    return found


def measure(rounds: int, with_bytes: bool) -> dict[str, Any]:
    """What one rank measures."""
    found = {variant: bytes_of(variant) for variant in VARIANTS if with_bytes}
    return {"bytes": found, "seconds": seconds_of(rounds)}


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mbit", type=float)
    arguments = parser.parse_args()
    if arguments.mbit:
        require_root_and_iproute2()
        network: Any = rate_limited(RANKS, arguments.mbit)
    else:
        network = contextlib.nullcontext(loopback(RANKS))
    with network as hosts:
        found = run_ranks(
            measure, hosts, timeout=900, rounds=arguments.rounds, with_bytes=not arguments.mbit
        )
    body = []
    if not arguments.mbit:
        rows = []
        for variant in VARIANTS:
            one = max((rank["bytes"][variant] for rank in found), key=lambda one: one["peak"])
            has = 2 * one["parameters"] + 2 * one["owned"]
            most = 4 * one["parameters"]
            if variant != "replicated":
                most = 2 * one["parameters"] + 2 * one["parameters"] // RANKS + one["largest"]
            figures = [f"{n / MIB:.1f}" for n in (one["peak"], has, most)]
            step = max(rank["bytes"][variant]["step"] for rank in found) / MIB
            rows.append([variant, *figures, f"{one['peak'] / has:.3f}", f"{step:.1f}"])
        peak, formula = "peak MiB of an update, per rank", "formula MiB"
        header = ["optimizer", peak, formula, "at most MiB", "peak / formula"]
        body += table([*header, "peak MiB of a step, per rank"], rows)
        body += ["", FORMULAS, ""]
    rows, medians = [], {}
    kinds = ["CPU time of a rank", "time by the clock"][: 2 if arguments.mbit else 1]
    for place, kind in enumerate(kinds):
        for variant in VARIANTS:
            medians[variant] = 1000 * statistics.median(
                one[place] for rank in found for one in rank["seconds"][variant]
            )
        for variant in VARIANTS[1:]:
            shares = sorted(
                sharded[place] / plain[place]
                for rank in found
                for plain, sharded in zip(
                    *(rank["seconds"][one] for one in ("replicated", variant)), strict=True
                )
            )
            low, middle, high = statistics.quantiles(shares, n=4)
            figures = [f"{medians[one]:.0f}" for one in ("replicated", variant)]
            rows.append([kind, variant, f"{middle:.3f} ({low:.3f} to {high:.3f})", *figures])
    header = ["of a step", "optimizer", "ratio to replicated (quartiles)", "replicated ms", "ms"]
    body += table(header, rows)
    if arguments.mbit:
        travels = BLOCKS * (WIDTH + 1) * WIDTH * 4 * (RANKS - 1) / RANKS
        link = 8000 * travels / (arguments.mbit * 1e6)
        more = {one: medians[one] - medians["replicated"] for one in VARIANTS[1:]}
        body += [
            "",
            f"Each rank receives {travels / MIB:.1f} MiB of parameters in an update, which takes "
            f"the link {link:.0f} ms without headers. A step took {more['sharded']:.0f} ms more "
            "than replicated.",
        ]
    command, topic = "python -m benchmarks.memory.sharding", "sharding"
    title = "Optimizer state spread over two ranks"
    if arguments.mbit:
        command += f" --mbit {arguments.mbit:g}"
        topic, title = "sharding_slow_link", f"{title}, {arguments.mbit:g} Mbit/s between them"
    path = write_record(topic, title, command, body)
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
