"""The peak bytes of one training step in several forms, each in a process of its own.

Paddle 2.6 cannot reset its peak on a CPU, so a step is measured in a child that is forked before
the first operator ran. Prints one JSON object: name -> bytes above what model and input take.

    python -m tests.recompute.peaks
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import paddle

from paddle_recompute import RecomputeConfig, apply_recompute, recompute
from paddle_recompute._paddle import memory as _memory

BLOCKS, WIDTH, BATCH = 8, 64, 512


def block() -> paddle.nn.Layer:
    """Keeps five tensors of the input's size for its backward."""
    return paddle.nn.Sequential(
        paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.GELU(), paddle.nn.LayerNorm(WIDTH),
        paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.Tanh(),
    )  # fmt: skip


def chain() -> paddle.nn.Layer:
    return paddle.nn.Sequential(*[block() for _ in range(BLOCKS)])


def of_config(**settings: Any) -> Callable[[paddle.nn.Layer, paddle.Tensor], paddle.Tensor]:
    def forward(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        apply_recompute(model, RecomputeConfig(**{"checkpoints": ["*"], **settings}))
        return model(x)

    return forward


def each_block(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    for layer in model:
        x = recompute(layer, x)
    return x


def each_block_in_halves(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    """Two levels: only one input is kept for each half of the chain."""
    layers = list(model)
    for half in (layers[: BLOCKS // 2], layers[BLOCKS // 2 :]):

        def run_half(x: paddle.Tensor, half: Any = half) -> paddle.Tensor:
            for layer in half:
                x = recompute(layer, x)
            return x

        x = recompute(run_half, x)
    return x


def halves(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    """One level: while a half is recomputed, all its activations are there."""
    layers = list(model)
    for half in (layers[: BLOCKS // 2], layers[BLOCKS // 2 :]):
        x = recompute(paddle.nn.Sequential(*half), x)
    return x


def paddles_own(model: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
    from paddle.distributed.fleet.utils import recompute

    for layer in model:
        x = recompute(layer, x)
    return x


STEPS: dict[str, Callable[[paddle.nn.Layer, paddle.Tensor], paddle.Tensor]] = {
    "plain": lambda model, x: model(x),
    "Paddle's own": paddles_own,
    "each block": each_block,
    "halves": halves,
    "halves of blocks": each_block_in_halves,
    "wrapped blocks": of_config(),
    "every second block": of_config(policy="every_n"),
}


def measure(forward: Callable[[paddle.nn.Layer, paddle.Tensor], paddle.Tensor]) -> int:
    """Bytes that one step takes beyond model, input and the parameters' gradients."""
    paddle.seed(0)
    model, x = chain(), paddle.randn([BATCH, WIDTH])
    x.stop_gradient = False
    for parameter in model.parameters():
        parameter.grad = paddle.zeros_like(parameter)
    before = _memory.current_bytes()
    forward(model, x).sum().backward()
    return _memory.peak_bytes() - before


def in_a_child(forward: Callable[[paddle.nn.Layer, paddle.Tensor], paddle.Tensor]) -> int:
    with tempfile.TemporaryFile("w+") as result:
        child = os.fork()
        if child == 0:
            result.write(str(measure(forward)))
            result.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, f"the child ended with status {status}"
        result.seek(0)
        return int(result.read())


if __name__ == "__main__":
    print(json.dumps({name: in_a_child(forward) for name, forward in STEPS.items()}))
