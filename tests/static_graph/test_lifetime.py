"""A `StaticTrainStep` frees what it holds: programs, parameters, moments."""

from __future__ import annotations

import json

from tests.processes import python

SCRIPT = """
import gc, json, paddle
from paddle_recompute import (load_config)
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.static_graph import StaticTrainStep
config = load_config("fleet_configs/contrastive_ernie-tiny_2cpu.yaml", ["recompute.enable=false"])
held, freed = [], []
for _ in range(3):
    step = StaticTrainStep(
        config, lambda: paddle.nn.Linear(500, 500), lambda model, x: model(x).square().mean()
    )
    for _ in range(2):
        step([paddle.ones([8, 500])])
    held.append(_memory.current_bytes())
    del step
    gc.collect()
    freed.append(_memory.current_bytes())
print(json.dumps([held, freed]))
"""


def test_three_steps_take_the_memory_of_one() -> None:
    """In a process of its own, where nothing else is freed meanwhile."""
    held, freed = json.loads(python("-c", SCRIPT).stdout.splitlines()[-1])
    a_model = 500 * 500 * 4
    assert min(held) > 3 * a_model  # parameters and two moments
    assert max(freed) < a_model / 100
