"""Peak memory and step time of the ways to recompute, against Paddle's own, on one encoder.

12 post-norm Transformer blocks, hidden 256, feed-forward 1024, 4 heads, batch 16, length 64, GELU,
dropout 0.1, AdamW. The peak is the largest number of bytes during the third step, each variant in a
process of its own; time is the ratio within a round of one step of each variant, in one process.
Then four kinds of blocks, two of each in a chain, with all blocks recomputed by Paddle and by us:
the CPU time of a step in the same way. Where a block ends with a product after which nothing is
saved, a further row keeps it: the second forward stops before it.

    python -m benchmarks.memory.recompute_cost [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import paddle

from benchmarks.harness.record import in_own_process, picture, table, write_record
from benchmarks.harness.timing import paired_seconds, ratios, shown
from benchmarks.memory._block_kinds import BLOCKS as CHAIN
from benchmarks.memory._block_kinds import KINDS, Kind
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import apply_recompute

LAYERS, HIDDEN, BATCH, LENGTH = 12, 256, 16, 64
BLOCKS = ["layers.*"]

ALL = {"checkpoints": BLOCKS}
VARIANTS: dict[str, dict[str, Any]] = {
    "no recompute": {},
    "Paddle, reentrant (its default)": {"paddle": True},
    "Paddle, hooks": {"paddle": False},
    "all blocks": ALL,
    "every second block": {"checkpoints": BLOCKS, "policy": "every_n"},
    "all blocks, inputs on disk": {"checkpoints": BLOCKS, "offload": "disk"},
}
BASE = "Paddle, reentrant (its default)"
OF_KINDS = ("no recompute", BASE, "Paddle, hooks", "all blocks")
WARM_UP = 2


class PaddleRecompute(paddle.nn.Layer):
    """The encoder's blocks, each under fleet's own recompute."""

    def __init__(self, encoder: paddle.nn.Layer, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = encoder.layers
        self._use_reentrant = use_reentrant

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        from paddle.distributed.fleet.utils import recompute

        for layer in self.layers:
            x = recompute(layer, x, use_reentrant=self._use_reentrant)
        return x


def make_encoder() -> paddle.nn.Layer:
    """A fresh model, the same each time."""
    paddle.seed(0)
    block = paddle.nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, dropout=0.1, activation="gelu")
    return paddle.nn.TransformerEncoder(block, LAYERS)


def make_step(
    variant: dict[str, Any], kind: Kind | None = None, keep: str = ""
) -> Callable[[], float]:
    """One training step of a fresh model: of the encoder, or of a chain of blocks of one kind."""
    model = make_encoder() if kind is None else kind.model()
    if "paddle" in variant:
        model = PaddleRecompute(model, variant["paddle"])
    elif variant:
        apply_recompute(model, RecomputeConfig(**variant, keep=[keep] if keep else []))
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=model.parameters())
    x = paddle.randn((BATCH, LENGTH, HIDDEN) if kind is None else kind.shape)
    x.stop_gradient = False  # Paddle's reentrant form gives no gradients otherwise

    def step() -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        x.clear_grad()
        return float(loss)

    return step


def peak_of(name: str) -> dict[str, float]:
    """Peak bytes of the third step, and its loss."""
    step = make_step(VARIANTS[name])
    step(), step()
    if _memory.can_reset_peak():
        _memory.reset_peak()
    loss = step()
    return {"peak": _memory.peak_bytes(), "loss": loss}


def kind_rows(rounds: int) -> list[tuple[str, ...]]:
    """Of each kind of block the time of a step of `OF_KINDS`."""
    rows = []
    for name, kind in KINDS.items():
        steps = {one: make_step(VARIANTS[one], kind) for one in OF_KINDS}
        if kind.last:
            steps["all blocks, the last product kept"] = make_step(ALL, kind, kind.last)
        seconds = paired_seconds(steps, warm_up=WARM_UP, rounds=rounds, clock=time.process_time)
        to_plain, to_paddle = ratios(seconds, OF_KINDS[0]), ratios(seconds, BASE)
        for one in steps:
            rows.append((name, one, f"{to_plain[one][0]:.3f}", shown(to_paddle[one])))
            print(*rows[-1], sep=" | ", flush=True)
    return rows


def draw(peaks: dict[str, int], times: dict[str, float]) -> str:
    """Peak against time, a point a variant; returns the name of the file."""
    with picture("recompute_cost") as (axes, name):
        for variant, peak in peaks.items():
            color = "#999999" if variant.startswith(("Paddle", "no ")) else "#1f77b4"
            point = (times[variant], peak / 1e6)
            axes.scatter(*point, s=60, color=color)
            axes.annotate(variant, point, (7, 5), textcoords="offset points", size=8)
        axes.set_xlabel("step time, as a ratio to the step without recompute")
        axes.set_ylabel("peak memory of a step, MB")
        axes.set_title(f"{LAYERS} blocks, hidden {HIDDEN}, batch {BATCH}, length {LENGTH}")
        axes.set_ylim(0)
        axes.margins(x=0.25)
    return name


def main() -> None:
    """Measure everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peak-of", choices=VARIANTS, help="internal: one variant's peak")
    options = parser.parse_args()
    if options.peak_of:
        print(json.dumps(peak_of(options.peak_of)))
        return

    module = "benchmarks.memory.recompute_cost"
    measured = {name: in_own_process(module, "--peak-of", name) for name in VARIANTS}
    steps = {name: make_step(variant) for name, variant in VARIANTS.items()}
    seconds = paired_seconds(steps, warm_up=WARM_UP, rounds=options.rounds)
    to_plain, to_paddle = ratios(seconds, "no recompute"), ratios(seconds, BASE)
    del steps
    peaks = {name: result["peak"] for name, result in measured.items()}
    rows = [
        (
            name,
            f"{peak:,}",
            f"{peak / peaks['no recompute']:.3f}",
            f"{peak / peaks[BASE]:.4f}",
            f"{to_plain[name][0]:.3f}",
            shown(to_paddle[name]),
            f"{measured[name]['loss']:.9g}",
        )
        for name, peak in peaks.items()
    ]
    header = ["variant", "peak, bytes", "peak / plain", "peak / Paddle's default", "time / plain"]
    header += ["time / Paddle's default (quartiles)", "loss of step 3"]
    drawn = draw(peaks, {name: middle for name, (middle, _, _) in to_plain.items()})
    kinds = kind_rows(options.rounds)
    write_record(
        "recompute_cost",
        "Peak memory and step time of recompute",
        "python -m benchmarks.memory.recompute_cost",
        [
            *(__doc__ or "").strip().splitlines()[:9],
            "",
            f"Warm-up {WARM_UP} rounds, measured {options.rounds} rounds.",
            "",
            *table(header, rows),
            "",
            f"![peak against time]({drawn})",
            "",
            f"## Kinds of blocks, {CHAIN} in a chain",
            "",
            *table(("kind", "variant", "CPU time / plain", header[-2]), kinds),
        ],
    )


if __name__ == "__main__":
    main()
