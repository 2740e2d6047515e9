"""Two ranks, 64 MiB of parameters, AdamW: replicated, beside what is spread over the ranks.

16 Layers of ``Linear(1024, 1024)``, each recomputed, float32. `ShardedOptimizer` spreads the
optimizer state, and ``offload="ranks"`` (with ``--parameters``; a shard for each Layer) parameters
and gradients too. Bytes are those of Paddle's allocator above what was there before the model, of
the rank that has most: the peak of the third step, and that of its update or what is held before
it. Time is the ratio within a round of the second of two steps with 64 rows of each variant, in one
run; that of CPU time counts all threads of a rank. With ``--mbit``, the ranks are in two network
namespaces with a link of that rate, and time by the clock is measured too; this needs root and
iproute2.

    python -m benchmarks.memory.sharding [--parameters] [--rounds N] [--mbit RATE]
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
from benchmarks.harness.timing import in_turn, quartiles, shown, timed
from paddle_recompute import (
    GradientSync,
    OffloadSequential,
    RecomputeConfig,
    ShardedOptimizer,
    TrainStep,
    apply_recompute,
)
from paddle_recompute._paddle import memory as _memory

BLOCKS, WIDTH, ROWS, RANKS, WARM_UP = 16, 1024, 64, 2, 2
REPLICATED, SHARDED, ON_RANKS = "replicated", "sharded", "on ranks"
WITHOUT = "replicated without recompute"
SHARD = 4 * WIDTH * (WIDTH + 1)
"""Bytes of the parameters of one Layer."""
MIB = 2**20
STATE_FORMULA = (
    "The formula is 8 P bytes for P parameters and gradients of float32, and 8 bytes for each "
    "parameter that the rank owns. At most: 8 P + 8 P / n on n ranks, and the largest parameter."
)
PARAMETERS_FORMULA = (
    "The formula on n ranks is 12 P / n bytes between steps, and 16 P / n and the parameters of "
    "two shards at the peak. The replicated run has buffers of gradients at its peak."
)


def adamw(parameters: list[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    """The optimizer, of all or of a part."""
    return paddle.optimizer.AdamW(1e-4, parameters=parameters)


def model_and_optimizer(variant: str) -> tuple[paddle.nn.Layer, Any]:
    """A fresh model and its optimizer."""
    paddle.seed(0)
    layers = [paddle.nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)]
    if variant == ON_RANKS:
        chain = OffloadSequential(layers, num_shards=BLOCKS, offload="ranks")
        return chain, chain.optimizer(adamw)
    model = paddle.nn.Sequential(*layers)
    if variant != WITHOUT:
        apply_recompute(model, RecomputeConfig(enable=True, checkpoints=["*"]))
    if variant == SHARDED:
        return model, ShardedOptimizer(adamw, model)
    return model, adamw(model.parameters())


def mean_square(model: Any, x: paddle.Tensor) -> paddle.Tensor:
    """A loss."""
    return model(x).square().mean()


def step_of(variant: str, clip: float | None = None) -> Callable[[int], float]:
    """A step with a number of rows; a fresh model."""
    step = TrainStep(*model_and_optimizer(variant), loss_fn=mean_square, clip_grad_norm=clip)
    return lambda rows: step([paddle.randn([rows, WIDTH])]).loss


def bytes_of_update(variant: str) -> dict[str, int]:
    """Peak bytes of the third step and of its update, and of what this rank has moments."""
    gc.collect()  # what the variant before has left
    before = _memory.current_bytes()
    model, optimizer = model_and_optimizer(variant)
    sync = GradientSync(model, mode="fused")
    peak = step = 0
    for _ in range(3):
        _memory.reset_peak()
        with sync.last_backward():
            mean_square(model, paddle.randn([ROWS, WIDTH])).backward()
        step = _memory.peak_bytes() - before
        _memory.reset_peak()
        optimizer.step()
        peak = _memory.peak_bytes() - before
        optimizer.clear_grad(set_to_zero=False)
    sizes = {one.name: int(one.size * one.element_size()) for one in model.parameters()}
    owned = getattr(optimizer, "owned", sizes)
    return {"peak": peak, "step": max(step, peak), "owned": sum(sizes[name] for name in owned)}


def bytes_of_step(variant: str) -> dict[str, int]:
    """Bytes between the second and the third step, and the peak of the third."""
    gc.collect()
    before = _memory.current_bytes()
    step = step_of(variant)
    for _ in range(2):
        step(1)
    held = _memory.current_bytes() - before
    _memory.reset_peak()
    step(1)
    return {"between steps": held, "peak of a step": _memory.peak_bytes() - before}


def measure(variants: tuple[str, ...], rounds: int, with_bytes: bool) -> dict[str, Any]:
    """What one rank measures: bytes, and (CPU seconds, seconds) round by round."""
    measured = bytes_of_step if ON_RANKS in variants else bytes_of_update
    found = {one: measured(one) for one in variants if with_bytes and one != WITHOUT}
    gc.collect()
    clip = None if ON_RANKS in variants else 1.0

    def second(step: Callable[[int], float]) -> Callable[[], tuple[float, ...]]:
        run = timed(lambda: step(ROWS), time.process_time, time.perf_counter)
        return lambda: (step(ROWS), run())[1]

    steps = {one: second(step_of(one, clip)) for one in variants}
    return {"bytes": found, "seconds": in_turn(steps, warm_up=WARM_UP, rounds=rounds)}


def state_table(found: list[dict[str, Any]]) -> list[str]:
    """Peaks of an update beside the formula."""
    rows, whole = [], BLOCKS * SHARD
    for variant in (REPLICATED, SHARDED):
        one = max((rank["bytes"][variant] for rank in found), key=lambda one: one["peak"])
        has, most = 2 * whole + 2 * one["owned"], 4 * whole
        if variant == SHARDED:
            most = 2 * whole + 2 * whole // RANKS + 4 * WIDTH * WIDTH
        step = max(rank["bytes"][variant]["step"] for rank in found)
        figures = [f"{n / MIB:.1f}" for n in (one["peak"], has, most)]
        rows.append([variant, *figures, f"{one['peak'] / has:.3f}", f"{step / MIB:.1f}"])
    header = ["optimizer", "peak MiB of an update, per rank", "formula MiB", "at most MiB"]
    header += ["peak / formula", "peak MiB of a step, per rank"]
    return [*table(header, rows), "", STATE_FORMULA, ""]


def parameters_table(found: list[dict[str, Any]]) -> list[str]:
    """What is held between steps and at the peak beside the formula."""
    held, most = 3 * BLOCKS * SHARD, 4 * BLOCKS * SHARD // RANKS + 2 * SHARD
    formulas = {REPLICATED: (held, None), ON_RANKS: (held // RANKS, most)}
    rows = []
    for variant, of_variant in formulas.items():
        for what, formula in zip(found[0]["bytes"][variant], of_variant, strict=True):
            size = max(one["bytes"][variant][what] for one in found)
            texts = [f"{formula / MIB:.1f}", f"{size / formula:.3f}"] if formula else ["", ""]
            rows.append([variant, what, f"{size / MIB:.1f}", *texts])
    header = ["parameters", "bytes", "MiB per rank", "formula MiB", "measured / formula"]
    return [*table(header, rows), "", PARAMETERS_FORMULA, ""]


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", action="store_true", help='offload="ranks"')
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mbit", type=float)
    arguments = parser.parse_args()
    variants = (ON_RANKS, REPLICATED, WITHOUT) if arguments.parameters else (SHARDED, REPLICATED)
    network: Any = contextlib.nullcontext(loopback(RANKS))
    if arguments.mbit:
        require_root_and_iproute2()
        network = rate_limited(RANKS, arguments.mbit)
    options = {"rounds": arguments.rounds, "with_bytes": not arguments.mbit}
    with network as hosts:
        found = run_ranks(measure, hosts, timeout=900, variants=variants, **options)
    body: list[str] = []
    if not arguments.mbit:
        body += parameters_table(found) if arguments.parameters else state_table(found)
    own, *others = variants

    def of(variant: str, place: int) -> list[float]:
        return [one[place] for rank in found for one in rank["seconds"][variant]]

    rows = []
    for place, kind in enumerate(["CPU time of a rank", "time by the clock"]):
        for other in others if place == 0 or arguments.mbit else []:
            pairs = zip(of(own, place), of(other, place), strict=True)
            medians = [1000 * statistics.median(of(one, place)) for one in (other, own)]
            ratio = shown(quartiles([one / two for one, two in pairs]))
            rows.append([kind, f"{own} / {other}", ratio, *(f"{one:.0f}" for one in medians)])
    header = ["of a step", "ratio of", "ratio (quartiles)", "the other's ms", "ms"]
    body += table(header, rows)
    if arguments.mbit and not arguments.parameters:
        travels = BLOCKS * SHARD * (RANKS - 1) / RANKS
        more = 1000 * (statistics.median(of(own, 1)) - statistics.median(of(REPLICATED, 1)))
        body += [
            "",
            f"Each rank receives {travels / MIB:.1f} MiB of parameters in an update, which takes "
            f"the link {8000 * travels / (arguments.mbit * 1e6):.0f} ms without headers. A step "
            f"took {more:.0f} ms more than replicated.",
        ]
    command, topic = "python -m benchmarks.memory.sharding", "sharding"
    title = "Optimizer state spread over two ranks"
    if arguments.parameters:
        command, topic = f"{command} --parameters", "sharding_parameters"
        title = "Parameters, gradients and optimizer state spread over two ranks"
    if arguments.mbit:
        command, topic = f"{command} --mbit {arguments.mbit:g}", f"{topic}_slow_link"
        title = f"{title}, {arguments.mbit:g} Mbit/s between them"
    write_record(topic, title, command, body)


if __name__ == "__main__":
    main()
