"""Data parallelism: gradients are averaged over the ranks while the backward runs.

    python -m paddle.distributed.launch --nproc_per_node 2 --backend gloo examples/data_parallel.py

The model is not in ``paddle.DataParallel``: `TrainStep` synchronizes the gradients itself, also
those of recomputed blocks.
"""

from __future__ import annotations

import argparse

import paddle
import paddle.distributed as dist

from paddle_recompute import RecomputeConfig, TrainStep, apply_recompute


def main() -> None:
    """Train and print each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--sync", choices=["overlap", "fused"], default="overlap")
    arguments = parser.parse_args()
    if dist.get_world_size() > 1 and not dist.is_initialized():
        dist.init_parallel_env()
    rank = dist.get_rank()
    paddle.seed(0)  # the same model on every rank
    block = paddle.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1)
    model = paddle.nn.TransformerEncoder(block, 4)
    apply_recompute(model, RecomputeConfig(checkpoints=["layers.*"]))
    optimizer = paddle.optimizer.AdamW(3e-3, parameters=model.parameters())
    step = TrainStep(
        model,
        optimizer,
        loss_fn=lambda model, x: (model(x) - x.roll(1, 1)).square().mean(),
        sync=arguments.sync,
    )
    paddle.seed(1 + rank)  # its own data and its own dropout masks
    x = paddle.randn([8, 16, 32])
    for number in range(arguments.steps):
        result = step([x])  # loss and norm are those of all ranks
        if rank == 0:
            print(f"step {number + 1}  loss {result.loss:.4f}  norm {result.grad_norm:.3f}")


if __name__ == "__main__":
    main()
