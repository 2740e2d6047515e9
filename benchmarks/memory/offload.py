"""A chain of 24 Transformer blocks whose parameters, gradients and moments are on disk.

Hidden 384, feed-forward 1536, 6 heads, batch 4, length 32, dropout 0.1, AdamW; 12 shards of two
blocks. The peak is the largest number of bytes of Paddle's allocator during the third step, each
variant in a process of its own. Time is the ratio within a round of one step of each variant, in
one process. Bytes moved are those that the process reads and writes (``/proc/self/io``).

    python -m benchmarks.memory.offload [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle

from benchmarks.harness.record import in_own_process, table, write_record
from benchmarks.harness.timing import paired_seconds, ratios, shown
from paddle_recompute import OffloadSequential, TrainStep, recompute_wrapper
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.recompute import slots

LAYERS, HIDDEN, BATCH, LENGTH, SHARDS = 24, 384, 4, 32, 12

VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "plain, each block recomputed": {},
    "on disk, prefetch=1": {"prefetch": 1},
    "on disk, prefetch=0": {"prefetch": 0},
}


def blocks() -> list[paddle.nn.Layer]:
    """The same each time."""
    paddle.seed(0)
    return [block() for _ in range(LAYERS)]


def adamw(parameters: Any) -> paddle.optimizer.Optimizer:
    """The optimizer, of all or of a shard."""
    return paddle.optimizer.AdamW(1e-4, parameters=parameters)


def make_step(options: dict[str, Any] | None) -> Callable[[], float]:
    """One training step of a fresh model."""
    optimizer: Any
    if options:
        # One block after the other is made: the device never holds all of them.
        paddle.seed(0)
        model: paddle.nn.Layer = OffloadSequential(
            [block] * LAYERS, num_shards=SHARDS, offload="disk", **options
        )
        optimizer = model.optimizer(adamw)
    else:
        layers = blocks()
        if options is not None:
            layers = [recompute_wrapper(layer) for layer in layers]
        model = paddle.nn.Sequential(*layers)
        optimizer = adamw(model.parameters())
    step = TrainStep(
        model, optimizer, loss_fn=lambda m, x: m(x).square().mean(), clip_grad_norm=1.0
    )
    x = paddle.randn([BATCH, LENGTH, HIDDEN])
    return lambda: step([x]).loss


def block() -> paddle.nn.Layer:
    """The next block."""
    return paddle.nn.TransformerEncoderLayer(HIDDEN, 6, 4 * HIDDEN, dropout=0.1, activation="gelu")


def num_bytes_moved() -> int:
    """What this process has read and written so far."""
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["rchar"]) + int(told["wchar"])


def measure(name: str) -> dict[str, Any]:
    """Peak bytes, bytes moved and losses of one variant, in this process."""
    step = make_step(VARIANTS[name])
    before = _memory.current_bytes()
    _memory.reset_peak()
    losses = [step(), step()]
    began = num_bytes_moved()
    losses.append(step())
    return {
        "before": before,
        "peak": _memory.peak_bytes(),
        "moved": num_bytes_moved() - began,
        "losses": losses,
    }


def bandwidth() -> float:
    """Bytes per second of one tensor of 64 MiB to the file and back, as a shard is sent."""
    tensor = paddle.zeros([16 * 2**20])
    slot = slots("disk", None)()
    slot.write(tensor)
    slot.read()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        slot.write(tensor)
        slot.read()
        times.append(time.perf_counter() - began)
    return 2 * 64 * 2**20 / statistics.median(times)


def main() -> None:
    """Measure all variants and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    module = "benchmarks.memory.offload"
    peaks = {name: in_own_process(module, "--measure", name) for name in VARIANTS}
    steps = {name: make_step(options) for name, options in VARIANTS.items()}
    seconds = paired_seconds(steps, warm_up=2, rounds=arguments.rounds)
    shares = ratios(seconds, to="plain")
    speed = bandwidth()
    plain = statistics.median(seconds["plain"])
    recomputed = statistics.median(seconds["plain, each block recomputed"])
    rows = []
    for name, found in peaks.items():
        rows.append(
            [
                name,
                f"{found['peak'] / 2**20:.1f}",
                f"1/{peaks['plain']['peak'] / found['peak']:.2f}",
                f"{found['moved'] / 2**20:.0f}",
                shown(shares[name], 2),
            ]
        )
    moved = peaks["on disk, prefetch=1"]["moved"] / speed
    same = len({tuple(found["losses"]) for found in peaks.values()}) == 1
    body = [
        *table(["variant", "peak MiB", "of plain", "MiB moved per step", "time of plain"], rows),
        "",
        f"- The three losses of all variants are {'equal to the bit' if same else 'NOT equal'}.",
        f"- Computation: {recomputed / plain:.2f} times plain (each block recomputed).",
        f"- Bytes moved / bandwidth ({speed / 2**30:.2f} GiB/s, to the file and back, page cache): "
        f"{moved / plain:.2f} times plain.",
        f"- So the limit is {max(recomputed, moved) / plain:.2f} times plain with everything "
        f"overlapped, and {(recomputed + moved) / plain:.2f} with nothing overlapped.",
    ]
    write_record("offload", "A chain larger than the device", f"python -m {module}", body)


if __name__ == "__main__":
    main()
