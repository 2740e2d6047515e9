"""Recompute: the same steps with less memory.

    python examples/recompute.py

Each block drops its activations in the forward and computes them again in the backward.
"""

from __future__ import annotations

import argparse

import paddle

from paddle_recompute import RecomputeConfig, TrainStep, apply_recompute


def make_model() -> paddle.nn.Layer:
    """Eight blocks with dropout."""
    paddle.seed(0)
    block = paddle.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1)
    return paddle.nn.TransformerEncoder(block, 8)


def losses_of(model: paddle.nn.Layer, steps: int) -> list[float]:
    """Train; dropout masks are repeated in the second forward."""
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    step = TrainStep(
        model, optimizer, loss_fn=lambda model, x: (model(x) - x.roll(1, 1)).square().mean()
    )
    paddle.seed(1)
    x = paddle.randn([8, 16, 64])
    return [step([x]).loss for _ in range(steps)]


def main() -> None:
    """Train without recompute and with it, and compare the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    plain = losses_of(make_model(), steps)
    model = make_model()
    print(apply_recompute(model, RecomputeConfig(checkpoints=["layers.*"])))
    recomputed = losses_of(model, steps)
    for number, loss in enumerate(recomputed, 1):
        print(f"step {number}  loss {loss:.4f}")
    print("the losses of the plain model:", "equal" if recomputed == plain else "different")


if __name__ == "__main__":
    main()
