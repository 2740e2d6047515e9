"""What is held for the backward against CPU time: recompute, `keep`, and torch's selective one.

6 pre-norm blocks, hidden 256, 4 heads, feed-forward 1024, GELU, no dropout; attention of two matrix
products and a softmax; 4 texts of 256 tokens, one thread. The same block in torch, where the same
operations are kept (`create_selective_checkpoint_contexts`). Held: the bytes between forward and
backward beyond parameters and input, by Paddle's allocator, and in torch by that of the C library.
Time: process CPU time of a forward and a backward, over that of the plain step in the same round.

    make bench-selective
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.harness.record import in_own_process, picture, table, torch_python, write_record
from benchmarks.harness.timing import paired_seconds, ratios, shown

LAYERS, HIDDEN, HEADS, BATCH, LENGTH = 6, 256, 4, 4, 256
# What is kept of a block: sublayers and methods by name; None: nothing is recomputed.
VARIANTS: dict[str, tuple[str, ...] | None] = {
    "plain": None,
    "all": (),
    "every_n: 2": (),
    "keep down": ("down",),
    "keep up": ("up",),
    "keep up, down": ("up", "down"),
    "keep attend": ("attend",),
    "keep all linear layers": ("qkv", "out", "up", "down"),
    "keep attend, all linear layers": ("attend", "qkv", "out", "up", "down"),
}
Side = Callable[[str], tuple[Callable[[], Any], Callable[[Any], list[bytes]], Callable[[], int]]]
"""For a variant: its forward, its backward, which returns the gradients' bytes, and a counter."""


def measure(make: Side, rounds: int) -> dict[str, Any]:
    """Of each variant of one side: bytes held, time to plain with quartiles, and whether the
    gradients are plain's to the bit.
    """
    held, steps, gradients = {}, {}, {}
    for name in VARIANTS:
        forward, backward, current = make(name)
        backward(forward())
        before = current()
        loss = forward()
        held[name] = current() - before
        gradients[name] = backward(loss)
        del loss

        def step(forward: Any = forward, backward: Any = backward) -> None:
            backward(forward())

        steps[name] = step
    seconds = paired_seconds(steps, warm_up=1, rounds=rounds, clock=time.process_time)
    return {
        name: {
            "held": held[name],
            "time": time_,
            "same": gradients[name] == gradients["plain"],
        }
        for name, time_ in ratios(seconds, "plain").items()
    }


def make_paddle(name: str) -> Any:
    """See `Side`."""
    import paddle
    from paddle.nn import functional as F

    from paddle_recompute import RecomputeConfig, apply_recompute
    from paddle_recompute._paddle import memory

    class Block(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = paddle.nn.LayerNorm(HIDDEN), paddle.nn.LayerNorm(HIDDEN)
            self.qkv = paddle.nn.Linear(HIDDEN, 3 * HIDDEN)
            self.out = paddle.nn.Linear(HIDDEN, HIDDEN)
            self.up = paddle.nn.Linear(HIDDEN, 4 * HIDDEN)
            self.down = paddle.nn.Linear(4 * HIDDEN, HIDDEN)

        def attend(self, q: Any, k: Any, v: Any) -> Any:
            return paddle.matmul(F.softmax(paddle.matmul(q, k, transpose_y=True)), v)

        def forward(self, x: Any) -> Any:
            mixed = self.qkv(self.norm1(x)).reshape([BATCH, -1, 3, HEADS, HIDDEN // HEADS])
            q, k, v = mixed.transpose([2, 0, 3, 1, 4]).unbind(0)
            heads = self.attend(q * (HIDDEN // HEADS) ** -0.5, k, v)
            x = x + self.out(heads.transpose([0, 2, 1, 3]).reshape(x.shape))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    paddle.seed(0)
    model = paddle.nn.Sequential(*[Block() for _ in range(LAYERS)])
    if (kept := VARIANTS[name]) is not None:
        policy: Any = "every_n" if name.startswith("every_n") else "all"
        keep = [f"*.{part}" for part in kept]
        apply_recompute(model, RecomputeConfig(checkpoints=["*"], policy=policy, keep=keep))
    x = paddle.randn([BATCH, LENGTH, HIDDEN])

    def backward(loss: Any) -> list[bytes]:
        loss.backward()
        gradients = [one.grad.numpy().tobytes() for one in model.parameters()]
        for one in model.parameters():
            one.clear_gradient(False)
        return gradients

    return lambda: model(x).square().mean(), backward, memory.current_bytes


def draw(found: dict[str, dict[str, Any]]) -> str:
    """Held against time, a point a variant, a color a side; returns the name of the file."""
    with picture("selective", (9, 5.5)) as (axes, name):
        for (side, one), color, below in zip(
            found.items(), ("#1f77b4", "#999999"), (5, -11), strict=True
        ):
            points = [(v["time"][0], v["held"] / one["plain"]["held"]) for v in one.values()]
            axes.scatter(*zip(*points, strict=True), s=45, color=color, label=side)
            for text, point in zip(one, points, strict=True):
                axes.annotate(
                    text, point, (6, below), textcoords="offset points", size=7, color=color
                )
        axes.set_xlabel("CPU time of a step, as a ratio to the plain step of the same library")
        axes.set_ylabel("held between forward and backward, as a ratio to plain")
        axes.set_title(f"{LAYERS} blocks, hidden {HIDDEN}, {BATCH} texts of {LENGTH} tokens")
        axes.set_ylim(0)
        axes.margins(x=0.2)
        axes.legend()
    return name


def main() -> None:
    """Ask both sides, and write the record and its picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--side", action="store_true", help="internal: measure this side")
    options = parser.parse_args()
    if options.side:
        from paddle_recompute import use_cpu_settings

        use_cpu_settings()
        print(json.dumps(measure(make_paddle, options.rounds)))
        return
    arguments = ("--side", "--rounds", str(options.rounds))
    modules = {
        "paddle_recompute": (sys.executable, "benchmarks.memory.selective"),
        "torch": (torch_python(), "benchmarks.memory._selective_torch"),
    }
    found = {
        side: in_own_process(module, *arguments, python=python, OMP_NUM_THREADS="1")
        for side, (python, module) in modules.items()
    }
    rows = []
    for side, one in found.items():
        plain, everything = one["plain"], one["all"]
        for name, value in one.items():
            kept = (value["held"] - everything["held"]) / 1e6
            row = (
                side,
                name,
                f"{value['held'] / 1e6:.2f}",
                f"{value['held'] / plain['held']:.3f}",
                f"{kept:.2f}",
                shown(value["time"]),
                "yes" if value["same"] else "no",
            )
            rows.append(row)
    header = (
        "library", "variant", "held, MB", "held / plain", "kept beyond all, MB",
        "time / plain (quartiles)", "gradients are plain's to the bit",
    )  # fmt: skip
    drawn = draw(found)
    write_record(
        "selective",
        "Selective recompute: memory against time",
        "make bench-selective",
        [
            *(__doc__ or "").strip().splitlines()[2:7],
            "",
            *table(header, rows),
            "",
            f"![held against time]({drawn})",
        ],
    )


if __name__ == "__main__":
    main()
