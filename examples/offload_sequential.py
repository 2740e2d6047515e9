"""Train a chain of Transformer blocks that the device does not hold.

    python examples/offload_sequential.py
    python -m paddle.distributed.launch --nproc_per_node 2 examples/offload_sequential.py

Parameters, gradients and the moments of AdamW are in a temporary file; one shard of two blocks is
in memory, and the next one is on its way.
"""

from __future__ import annotations

import argparse

import paddle
import paddle.distributed as dist

from paddle_recompute import OffloadSequential, TrainStep

WIDTH, LENGTH, BATCH = 64, 16, 8


def block() -> paddle.nn.Layer:
    """One block; it is called once for each."""
    return paddle.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1)


def next_of(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    """The loss: each position is to tell the one before it."""
    return (model(x) - x.roll(1, 1)).square().mean()


def main() -> None:
    """Train and print each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--offload", choices=["host", "disk"], default="disk")
    arguments = parser.parse_args()
    if dist.get_world_size() > 1:
        dist.init_parallel_env()
    paddle.seed(0)  # the same model on every rank
    model = OffloadSequential([block] * 8, num_shards=4, offload=arguments.offload)
    optimizer = model.optimizer(
        lambda parameters: paddle.optimizer.AdamW(3e-3, parameters=parameters)
    )
    step = TrainStep(model, optimizer, loss_fn=next_of, accumulate_steps=2, clip_grad_norm=1.0)
    paddle.seed(1 + dist.get_rank())
    data = [paddle.randn([BATCH, LENGTH, WIDTH]) for _ in range(2)]
    for number in range(arguments.steps):
        result = step(data)
        if dist.get_rank() == 0:
            print(f"step {number + 1}  loss {result.loss:.4f}  norm {result.grad_norm:.3f}")


if __name__ == "__main__":
    main()
