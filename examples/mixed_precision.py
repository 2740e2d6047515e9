"""Mixed precision: matrix products in half precision, parameters in float32.

    python examples/mixed_precision.py             # float16 with a dynamic loss scale, on a GPU
    python examples/mixed_precision.py --static    # bfloat16 in a Program, on a CPU too

In dygraph Paddle has no mixed precision on a CPU. There, the first command stops with an error.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import paddle

from paddle_recompute import AmpConfigs, TrainStep, load_config
from paddle_recompute.static_graph import StaticTrainStep

YAML = Path(__file__).parents[1] / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml"


def make_model() -> paddle.nn.Layer:
    """Two Linears."""
    return paddle.nn.Sequential(paddle.nn.Linear(16, 64), paddle.nn.GELU(), paddle.nn.Linear(64, 1))


def loss_fn(model: Any, batch: Any) -> Any:
    """A mean over the examples, in float32."""
    return (model(batch[0]).astype("float32") - batch[1]).square().mean()


def make_step(static: bool) -> TrainStep | StaticTrainStep:
    """One step in dygraph or as a Program; both are called in the same way."""
    if static:
        settings = ["amp=true", "amp_configs.dtype=bfloat16"]
        overrides = [f"strategy.{setting}" for setting in settings]
        overrides += ["recompute.enable=false", "train.learning_rate=0.01"]
        return StaticTrainStep(load_config(YAML, overrides), make_model, loss_fn)
    model = make_model()
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    amp = AmpConfigs(dtype="float16", init_loss_scaling=2.0**15, incr_every_n_steps=100)
    return TrainStep(model, optimizer, loss_fn=loss_fn, amp=amp)


def main() -> None:
    """Train and print each step; one that overflows float16 is skipped, and the scale shrinks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--static", action="store_true")
    arguments = parser.parse_args()
    paddle.seed(0)
    step = make_step(arguments.static)
    x = paddle.randn([32, 16])
    batch = (x, x.sum(axis=1, keepdim=True))
    for number in range(arguments.steps):
        result = step([batch])
        scale = "" if result.loss_scale is None else f"  loss scale {result.loss_scale:g}"
        print(f"step {number + 1}  loss {result.loss:.4f}{scale}")


if __name__ == "__main__":
    main()
