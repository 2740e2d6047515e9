"""Eager execution against a compiled model, with and without recompute: time and peak of a step.

The shapes are those of ERNIE-tiny (4 layers, hidden 312, 12 heads; 16 texts of 32 tokens) and
ERNIE-base (12 layers, hidden 768, 12 heads; 8 texts of 64 tokens, so that activations take more
than the 340 MB of gradients), both with 1,000 words and dropout 0.1, and ResNet-18 (4 images of
64 x 64). The update is SGD. The peak is the smaller one of
two steps, above what was held before the step: a thread of Paddle's executor frees tensors, and may
be late. Time is the ratio within a round of one step of each variant, in one process.

    python -m benchmarks.speed.compile [--rounds N] [--shapes ERNIE-tiny ...]

With some of the shapes alone, no record is written.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import paddle

from benchmarks.harness.record import table, write_record
from benchmarks.harness.timing import paired_seconds, ratios, shown
from paddle_recompute import RecomputeConfig, TrainStep, apply_recompute, build_model, compile_model
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.config import ModelConfig

IS_26 = paddle.__version__.startswith("2.6")
SHAPES: dict[str, dict[str, Any]] = {
    "ERNIE-tiny": {"num_layers": 4, "hidden_size": 312, "texts": (16, 32)},
    "ERNIE-base": {"num_layers": 12, "hidden_size": 768, "texts": (8, 64)},
    "ResNet-18": {},
}
VARIANTS = {
    "eager": (False, False),
    "compiled": (True, False),
    "eager, recompute": (False, True),
    "compiled, recompute": (True, True),
}
"""By name: (compiled, recomputed)."""


def variants() -> list[str]:
    """Those that this Paddle has: ``to_static`` of 2.6 takes no wrapped model."""
    return [name for name, both in VARIANTS.items() if not (IS_26 and all(both))]


def make_step(shape: str, variant: str) -> tuple[Callable[[], float], float]:
    """One training step of a fresh model, and the seconds that its conversion took."""
    compiled, wrap = VARIANTS[variant]
    paddle.seed(0)
    if shape == "ResNet-18":
        model = paddle.vision.models.resnet18(num_classes=10)
        spec = paddle.static.InputSpec([-1, 3, 64, 64], "float32")
        batch, blocks = paddle.randn([4, 3, 64, 64]), "layer?.*"
    else:
        given = dict(SHAPES[shape])
        size, hidden = given.pop("texts"), given["hidden_size"]
        model = build_model(
            ModelConfig(
                name="ernie",
                num_heads=12,
                intermediate_size=4 * hidden,
                max_position_embeddings=64,
                type_vocab_size=2,
                **given,
            ),
            1000,
        )
        spec = paddle.static.InputSpec([-1, -1], "int64")
        batch, blocks = paddle.randint(1, 1000, list(size)), "encoder.layers.*"
    if wrap:
        apply_recompute(model, RecomputeConfig(checkpoints=[blocks]))
    began = time.perf_counter()
    if compiled:
        compile_model(model, [spec])
    seconds = time.perf_counter() - began
    optimizer = paddle.optimizer.SGD(1e-3, parameters=model.parameters())
    step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).square().mean())

    def run() -> float:
        paddle.seed(1)
        return step([batch]).loss

    return run, seconds


def peak_of(step: Callable[[], float]) -> tuple[int, float]:
    """The smallest peak of two steps above what was held before, and the loss of the last."""
    peaks, loss = [], step()
    for _ in range(2):
        gc.collect()
        before = _memory.current_bytes()
        if not IS_26:
            _memory.reset_peak()
        loss = step()
        peaks.append(_memory.peak_bytes() - before)
    return min(peaks), loss


def main() -> None:
    """Measure all variants and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    arguments = parser.parse_args()
    rows, same = [], True
    for shape in arguments.shapes:
        made = {name: make_step(shape, name) for name in variants()}
        steps = {name: step for name, (step, _) in made.items()}
        peaks = {name: peak_of(step) for name, step in steps.items()}
        losses = {loss for _, loss in peaks.values()}
        same &= len(losses) == 1
        shares = ratios(paired_seconds(steps, warm_up=0, rounds=arguments.rounds), to="eager")
        for name, (_, seconds) in made.items():
            rows.append(
                [
                    shape,
                    name,
                    shown(shares[name], 2),
                    f"{peaks[name][0] / 2**20:.1f}",
                    f"{seconds:.1f}" if name.startswith("compiled") else "",
                ]
            )
            print(*rows[-1], flush=True)
        del made, steps
        gc.collect()
    header = ["model", "variant", "time of eager", "peak MiB", "conversion, s"]
    body = [
        *table(header, rows),
        "",
        f"- The third losses of all variants of a model are {'' if same else 'NOT '}equal to the "
        "bit.",
        f"- CINN: `paddle.is_compiled_with_cinn()` is {paddle.is_compiled_with_cinn()}.",
    ]
    if arguments.shapes == list(SHAPES):
        write_record("compile", "Compiled models", "python -m benchmarks.speed.compile", body)
    else:
        print("\n".join(body))


if __name__ == "__main__":
    main()
