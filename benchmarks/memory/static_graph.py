"""Peak memory and step time of recompute in a static graph, against plain and against dygraph.

The encoder of `recompute_cost`: 12 post-norm Transformer blocks, hidden 256, 4 heads, feed-forward
1024, batch 16, length 64, GELU, dropout 0.1, AdamW; default settings of the executor.
The peak is the largest number of bytes in steps 3 to 7, each variant in a process of its own
(Paddle 2.6 cannot reset its peak, so there in steps 1 to 7); time is the ratio within a round of
one step of each variant, in one process.

    python -m benchmarks.memory.static_graph [--rounds N]    (0: the peaks alone)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
from paddle.distributed import fleet

from benchmarks.harness.record import in_own_process, table, write_record
from benchmarks.harness.timing import paired_seconds, ratios, shown
from benchmarks.memory import recompute_cost
from benchmarks.memory.recompute_cost import BATCH, BLOCKS, HIDDEN, LENGTH, make_encoder
from paddle_recompute import static_graph
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import apply_recompute

CHEAP = ["layers.*.activation", "layers.*.dropout*", "layers.*.norm*"]

VARIANTS: dict[str, dict[str, Any]] = {
    "static, no recompute": {},
    "static, all blocks": {"checkpoints": BLOCKS},
    "static, every second block": {"checkpoints": BLOCKS, "policy": "every_n"},
    "static, selective: activation, dropout, norm": {"checkpoints": CHEAP},
    "dygraph, no recompute": {},
    "dygraph, fleet.utils.recompute": {"paddle": True},
    "dygraph, all blocks": {"checkpoints": BLOCKS},
}
PLAIN = "static, no recompute"
TO_REACH = "dygraph, fleet.utils.recompute"
WARM_UP = 2
STEPS_OF_A_PEAK = 5


def make_static_step(selection: dict[str, Any]) -> Callable[[], float]:
    """One run of a fresh Program."""
    paddle.enable_static()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        model = make_encoder()
        if selection:
            apply_recompute(model, RecomputeConfig(**selection))
        x = paddle.static.data("x", [BATCH, LENGTH, HIDDEN])
        loss = model(x).square().mean()
        strategy = fleet.DistributedStrategy()
        strategy.recompute = bool(selection)
        static_graph.minimize(paddle.optimizer.AdamW(1e-4), loss, strategy)
    executor, scope = paddle.static.Executor(), paddle.static.Scope()
    executor.run(startup, scope=scope)
    paddle.disable_static()
    random = np.random.RandomState(0)
    feed = {"x": random.randn(BATCH, LENGTH, HIDDEN).astype("float32")}

    def step() -> float:
        paddle.enable_static()
        (value,) = executor.run(main, feed=feed, fetch_list=[loss], scope=scope)
        paddle.disable_static()
        return float(value)

    return step


def make_step(name: str) -> Callable[[], float]:
    """One training step of a fresh model."""
    make = make_static_step if name.startswith("static") else recompute_cost.make_step
    return make(VARIANTS[name])


def peak_of(name: str) -> dict[str, Any]:
    """Peak bytes of the steps after the warm-up, one by one, and the last loss."""
    step = make_step(name)
    for _ in range(WARM_UP):
        step()
    peaks = []
    for _ in range(STEPS_OF_A_PEAK):
        if _memory.can_reset_peak():
            _memory.reset_peak()
        loss = step()
        peaks.append(_memory.peak_bytes())
    return {"peak": max(peaks), "peaks": peaks, "loss": loss}


def main() -> None:
    """Measure everything and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="rounds of timing; 0: peaks alone")
    parser.add_argument("--peak-of", choices=VARIANTS, help="internal: one variant's peak")
    options = parser.parse_args()
    if options.rounds == 1:
        parser.error("quartiles need at least 2 rounds")
    if options.peak_of:
        print(json.dumps(peak_of(options.peak_of)))
        return

    measured = {
        name: in_own_process("benchmarks.memory.static_graph", "--peak-of", name)
        for name in VARIANTS
    }
    peaks = {name: result["peak"] for name, result in measured.items()}
    times: dict[str, tuple[float, float, float]] = {}
    if options.rounds:
        steps = {name: make_step(name) for name in VARIANTS}
        seconds = paired_seconds(steps, warm_up=WARM_UP, rounds=options.rounds)
        times = ratios(seconds, PLAIN)
    rows = [
        (
            name,
            f"{peak:,}",
            f"{peak / peaks[PLAIN]:.3f}",
            f"{peak / peaks[TO_REACH]:.4f}",
            shown(times[name]) if times else "not measured",
            f"{measured[name]['loss']:.9g}",
        )
        for name, peak in peaks.items()
    ]
    header = ["variant", "peak, bytes", "peak / plain static", "peak / fleet.utils.recompute"]
    header += ["time / plain static (quartiles)", "loss of step 7"]
    command = f"python -m benchmarks.memory.static_graph --rounds {options.rounds}"
    path = write_record(
        "static_graph" if times else "static_graph_peaks",
        "Recompute in a static graph: peak memory and step time",
        command,
        [
            *(__doc__ or "").strip().splitlines()[:7],
            "",
            f"Warm-up {WARM_UP} rounds, measured {options.rounds} rounds, medians of ratios.",
            "",
            *table(header, rows),
            "",
            "Dygraph and static draw their weights and masks in another order, so losses compare "
            "within a mode.",
        ],
    )
    figures = {"command": command, "peaks": measured, "time_to_plain_static": times}
    path.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
