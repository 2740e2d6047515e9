"""The side of `cpu_step` that is ours.

Argument: the plan as JSON. It reads a line ``way`` and prints the CPU seconds of one step. WITHOUT
in the environment takes ``unpadding`` or ``forms`` out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from benchmarks.harness.step_process import serve_steps
from paddle_recompute import ContrastiveLoss, GradCache, build_model, use_cpu_settings
from paddle_recompute.app.config import ModelConfig
from paddle_recompute.app.encoder import cpu_forms, ernie


def make_step(way: str, plan: dict[str, Any]) -> Callable[[], object]:
    """A training step of a fresh model."""
    paddle.seed(0)
    model = build_model(ModelConfig(preset="tiny", **plan["model"]), plan["words"])
    loss = ContrastiveLoss(plan["temperature"], symmetric=False, normalize=True)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters(), weight_decay=0.01)
    sides = [paddle.to_tensor(np.array(side)) for side in plan["batch"]]
    cache = GradCache(model, loss, chunk_tokens=plan["chunk_tokens"])

    def step() -> None:
        if way == "plain":
            loss(*map(model, sides)).backward()
        else:
            cache.backward(*sides)
        optimizer.step()
        optimizer.clear_grad()

    return step


if __name__ == "__main__":
    use_cpu_settings()
    if os.environ.get("WITHOUT") == "unpadding":
        ernie.indices_of = lambda keep: None
    if os.environ.get("WITHOUT") == "forms":
        cpu_forms.SMALLEST = 2**62
    plan = json.loads(sys.argv[1])
    serve_steps({way: make_step(way, plan) for way in ("plain", "cached")})
