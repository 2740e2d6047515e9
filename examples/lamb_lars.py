"""LAMB and LARS, the optimizers for large batches: Paddle's own, chosen as in DistributedStrategy.

    python examples/lamb_lars.py
    python examples/lamb_lars.py --optimizer lars

With `paddle-recompute train` it is one line of the YAML file: ``strategy: {lamb: true}``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import paddle

from paddle_recompute import TrainStep, load_config
from paddle_recompute.train_step import build_optimizer

YAML = Path(__file__).parents[1] / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml"
SETTINGS = {
    "lamb": ["lamb=true", "lamb_configs.exclude_from_weight_decay=['.b_0']"],
    "lars": ["lars=true", "lars_configs.lars_coeff=0.1"],
}
RATES = {"lamb": 0.01, "lars": 0.5}


def main() -> None:
    """Train and print each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--optimizer", choices=SETTINGS, default="lamb")
    arguments = parser.parse_args()
    config = load_config(YAML, [f"strategy.{setting}" for setting in SETTINGS[arguments.optimizer]])
    paddle.seed(0)
    model = paddle.nn.Sequential(
        paddle.nn.Linear(16, 64), paddle.nn.GELU(), paddle.nn.Linear(64, 1)
    )
    optimizer = build_optimizer(config.optimizer, model, RATES[arguments.optimizer])
    step = TrainStep(
        model,
        optimizer,
        loss_fn=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        clip_grad_norm=config.train.clip_grad_norm,
    )
    x = paddle.randn([256, 16])
    batch = (x, x.sum(axis=1, keepdim=True))
    for number in range(arguments.steps):
        result = step([batch])
        print(f"step {number + 1}  loss {result.loss:.4f}  norm {result.grad_norm:.3f}")


if __name__ == "__main__":
    main()
