"""Compiled graph: forward and backward of the model are one Program each, with recompute in them.

    python examples/compiled_graph.py

Loss, synchronization and update stay in eager execution. Paddle 2.6 converts no recomputed model;
there this script compiles the plain one.
"""

from __future__ import annotations

import argparse

import paddle

from paddle_recompute import RecomputeConfig, TrainStep, apply_recompute, compile_model


def main() -> None:
    """Train and print each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    paddle.seed(0)
    block = paddle.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1)
    model = paddle.nn.TransformerEncoder(block, 4)
    if not paddle.__version__.startswith("2.6"):
        apply_recompute(model, RecomputeConfig(checkpoints=["layers.*"]))
    spec = paddle.static.InputSpec([-1, -1, 32], "float32")  # -1: a size that varies
    print(compile_model(model, [spec]))
    optimizer = paddle.optimizer.AdamW(3e-3, parameters=model.parameters())
    step = TrainStep(
        model, optimizer, loss_fn=lambda model, x: (model(x) - x.roll(1, 1)).square().mean()
    )
    paddle.seed(1)
    x = paddle.randn([8, 16, 32])
    for number in range(steps):
        result = step([x])
        print(f"step {number + 1}  loss {result.loss:.4f}  norm {result.grad_norm:.3f}")


if __name__ == "__main__":
    main()
