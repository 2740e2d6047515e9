"""Accumulation: one optimizer step from several micro-batches, with one synchronization.

    python examples/accumulation.py
    python -m paddle.distributed.launch --nproc_per_node 2 examples/accumulation.py

The memory is that of one micro-batch; the gradient is that of the whole batch. The micro-batches
may differ in size. On several ranks the gradients are sent once per step, in the last backward.
"""

from __future__ import annotations

import argparse

import paddle
import paddle.distributed as dist

from paddle_recompute import TrainStep


def main() -> None:
    """Train and print each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    steps = parser.parse_args().steps
    if dist.get_world_size() > 1:
        dist.init_parallel_env()
    paddle.seed(0)  # the same model on every rank
    model = paddle.nn.Sequential(
        paddle.nn.Linear(16, 64), paddle.nn.GELU(), paddle.nn.Linear(64, 1)
    )
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    step = TrainStep(
        model,
        optimizer,
        loss_fn=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        accumulate_steps=3,
    )
    paddle.seed(1 + dist.get_rank())
    x = paddle.randn([32, 16])
    y = x.sum(axis=1, keepdim=True)
    rows = [slice(0, 12), slice(12, 24), slice(24, 32)]
    for number in range(steps):
        result = step([(x[part], y[part]) for part in rows])
        if dist.get_rank() == 0:
            print(f"step {number + 1}  loss {result.loss:.4f}  norm {result.grad_norm:.3f}")


if __name__ == "__main__":
    main()
