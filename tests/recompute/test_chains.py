"""What a loop changes between the forward and the backward of a chain of blocks.

Ours is an `OffloadSequential`, which promises what `recompute` promises; Paddle's recompute is
called for each block.
"""

from __future__ import annotations

import contextlib
from typing import Any

import paddle

from paddle_recompute import OffloadSequential, recompute
from paddle_recompute.offload import resident
from tests.recompute.contract import Run, Seen, WarmingUp, case, leaf

Tensor = paddle.Tensor
SCHEDULE = {"temperature": 1.0}


class Scheduled(paddle.nn.Layer):
    """Reads a number of its own and one of the module, and has a Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = paddle.nn.Linear(4, 4), paddle.nn.Dropout(0.2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.linear(x)) * self.scale / SCHEDULE["temperature"]
        return y.tanh()


def chained(run: Run, blocks: list[paddle.nn.Layer]) -> Any:
    if run is recompute:
        return OffloadSequential(paddle.nn.Sequential(*blocks), num_shards=2, offload="host")
    chain = paddle.nn.Sequential(*blocks)

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = run(block, x)
        return x

    chain.forward = forward
    return chain


def gradients_of(chain: Any) -> list[Tensor | None]:
    is_offloaded = isinstance(chain, OffloadSequential)
    with resident(chain) if is_offloaded else contextlib.nullcontext():
        return [None if one.grad is None else one.grad.clone() for one in chain.parameters()]


@case(
    "a chain of blocks: {what} changes between forward and backward",
    what=["an attribute", "a global", "Dropout.p"],
)
def test_schedule(run: Run, what: str) -> Seen:
    blocks, x = [Scheduled(), Scheduled()], leaf(3, 4)
    chain, losses = chained(run, blocks), []
    try:
        for step in range(2):
            loss = chain(x * 2).square().sum()
            for block in blocks:
                if what == "an attribute":
                    block.scale *= 0.5
                elif what == "Dropout.p":
                    block.dropout.p += 0.3
            if what == "a global":
                SCHEDULE["temperature"] = 2.0 + step
            loss.backward()
            losses.append(loss)
    finally:
        SCHEDULE["temperature"] = 1.0
    return {"x": x, "losses": losses, "gradients": gradients_of(chain)}


@case("a chain of blocks that count in Python beside their buffers")
def test_counting(run: Run) -> Seen:
    blocks = [paddle.nn.Sequential(paddle.nn.Linear(4, 4), WarmingUp()) for _ in range(2)]
    x = leaf(3, 4)
    chain, losses = chained(run, blocks), []
    for _ in range(3):
        losses.append(chain(x * 2).square().sum())
        losses[-1].backward()
    numbers = [(block[1].calls, block[1].mean) for block in blocks]
    return {"x": x, "losses": losses, "numbers": numbers, "gradients": gradients_of(chain)}
