"""Trains a stack of 24 Layers on the simulated device, whose memory is bounded, plain or offloaded.

python -m tests.fake_device.bounded plain|offloaded MEMORY_MB
"""

from __future__ import annotations

import json
import sys
from typing import Any

import paddle

from paddle_recompute import OffloadSequential, TrainStep
from tests.fake_device import switches

LAYERS, WIDTH, BATCH, SHARDS = 24, 512, 8, 12


def layer() -> paddle.nn.Layer:
    return paddle.nn.Linear(WIDTH, WIDTH)


def adamw(parameters: Any) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.AdamW(1e-3, parameters=parameters)


def losses(kind: str) -> list[float]:
    paddle.seed(0)
    optimizer: Any
    if kind == "plain":
        model: paddle.nn.Layer = paddle.nn.Sequential(*[layer() for _ in range(LAYERS)])
        optimizer = adamw(model.parameters())
    else:
        model = OffloadSequential([layer] * LAYERS, num_shards=SHARDS, offload="host")
        optimizer = model.optimizer(adamw)
    step = TrainStep(model, optimizer, loss_fn=lambda m, x: m(x).square().mean())
    x = paddle.randn([BATCH, WIDTH])
    return [step([x]).loss for _ in range(3)]


if __name__ == "__main__":
    with switches.set_to(memory_mb=int(sys.argv[2])):
        told = losses(sys.argv[1])
    print(json.dumps({"losses": told, "peak": switches.read("peak_bytes")}))
