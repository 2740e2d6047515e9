"""A small run, with a plain optimizer or a sharded one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_recompute import (
    ContrastiveLoss,
    GradCache,
    RecomputeConfig,
    ShardedOptimizer,
    TrainStep,
    apply_recompute,
)
from tests.fake_device import selected

WIDTH = 8
Make = Callable[[list[paddle.Tensor]], paddle.optimizer.Optimizer]
RATE = 0.02
OPTIMIZERS: dict[str, Callable[..., paddle.optimizer.Optimizer]] = {
    "sgd": functools.partial(paddle.optimizer.SGD, RATE),
    "momentum": functools.partial(paddle.optimizer.Momentum, RATE, 0.9),
    "adam": functools.partial(paddle.optimizer.Adam, RATE),
    "adamw": functools.partial(paddle.optimizer.AdamW, RATE, weight_decay=0.05),
    "rmsprop": functools.partial(paddle.optimizer.RMSProp, RATE, momentum=0.9),
    "lamb": functools.partial(paddle.optimizer.Lamb, RATE),
}


def make_of(name: str) -> Make:
    """The function that makes the optimizer `name` over its argument."""
    return lambda parameters: OPTIMIZERS[name](parameters=parameters)


def _clipping(norm: paddle.nn.ClipGradBase) -> Make:
    return lambda parameters: paddle.optimizer.AdamW(parameters=parameters, grad_clip=norm)


def _clipping_a_group(parameters: list[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    group = {"params": parameters, "grad_clip": paddle.nn.ClipGradByGlobalNorm(1.0)}
    return paddle.optimizer.AdamW(parameters=[group])


def _clipping_inside(parameters: list[paddle.Tensor]) -> paddle.optimizer.Optimizer:
    return paddle.incubate.LookAhead(_clipping(paddle.nn.ClipGradByGlobalNorm(1.0))(parameters))


class _OwnClip(paddle.nn.ClipGradByGlobalNorm):
    """One of the user's."""


CLIPPING: dict[str, Make] = {
    "the optimizer": _clipping(paddle.nn.ClipGradByGlobalNorm(1.0)),
    "the user's own": _clipping(_OwnClip(1.0)),
    "a parameter group": _clipping_a_group,
    "the optimizer inside LookAhead": _clipping_inside,
}
"""Optimizers that clip by a norm over several gradients."""


class Block(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = paddle.nn.LayerNorm(WIDTH)
        self.up = paddle.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = paddle.nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = paddle.nn.Dropout(0.1)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x + self.dropout(self.down(paddle.nn.functional.gelu(self.up(self.norm(x)))))


class Net(paddle.nn.Layer):
    """Three blocks; with `shared`, the head is the weight of the stem, read as ``stem.weight``."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.stem = paddle.nn.Linear(WIDTH, WIDTH)
        self.blocks = paddle.nn.LayerList([Block() for _ in range(3)])
        self.head = None if shared else paddle.nn.Linear(WIDTH, WIDTH)
        if shared:
            self.blocks[2].norm.weight = self.blocks[0].norm.weight

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if self.head is None:
            return paddle.matmul(x, self.stem.weight, transpose_y=True)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """What a run is made of."""

    optimizer: str = "adamw"
    kind: str = "plain"
    clip: float | None = 0.05
    recompute: bool = True
    frozen: bool = False
    shared: bool = False

    def __str__(self) -> str:
        return " ".join(f"{one.name}={getattr(self, one.name)}" for one in fields(self))


def all_cases() -> Iterator[Case]:
    """The whole table."""
    flags = (False, True)
    kinds = ("plain", "accumulated", "cached")
    # The simulated device runs the kernel of the CPU, which refuses parameters that it has copied.
    names = [name for name in OPTIMIZERS if name != "rmsprop" or not selected.is_selected()]
    for values in product(names, kinds, (None, 0.05), flags, flags, flags):
        yield Case(*values)


def filled(model: paddle.nn.Layer, seed: int = 1) -> paddle.nn.Layer:
    """`model` with the same random parameters on every rank."""
    rng = np.random.RandomState(seed)
    for parameter in model.parameters():
        values = rng.randn(*parameter.shape) * 0.3
        parameter.set_value(paddle.to_tensor(values.astype("float32")))
    return model


class Training:
    """A model, its optimizer and its step."""

    def __init__(self, case: Case, *, sharded: bool, **options: bool) -> None:
        self.case = case
        self.model = filled(Net(case.shared))
        if case.frozen:
            for parameter in self.model.blocks[1].up.parameters():
                parameter.stop_gradient = True
        if case.recompute:
            apply_recompute(self.model, RecomputeConfig(enable=True, checkpoints=["blocks.*"]))
        make = make_of(case.optimizer)
        self.optimizer: Any
        if sharded:
            self.optimizer = ShardedOptimizer(make, self.model, **options)
        else:
            self.optimizer = make(self.model.parameters())
        trained: dict[str, Any] = {"loss_fn": lambda model, x: model(x).square().mean()}
        if case.kind == "cached":
            loss = ContrastiveLoss(temperature=0.1)
            trained = {"grad_cache": GradCache(self.model, loss, chunk_size=2)}
        self.num_micro = 2 if case.kind == "accumulated" else 1
        self.step = TrainStep(
            self.model,
            self.optimizer,
            accumulate_steps=self.num_micro,
            clip_grad_norm=case.clip,
            **trained,
        )
        self.figures: list[tuple[float, float]] = []

    def run(self, first: int, last: int) -> Training:
        """The steps from `first` up to `last`, which is not made; loss and norm of each."""
        rank = dist.get_rank()
        for step in range(first, last):
            paddle.seed(100 * step + rank)
            results = self.step(
                [self.micro_batch(step, one, rank) for one in range(self.num_micro)]
            )
            self.figures.append((results.loss, results.grad_norm))
        return self

    def micro_batch(self, step: int, micro: int, rank: int) -> Any:
        """Of another size on each rank."""
        rng = np.random.RandomState(1000 * step + 10 * micro + rank)
        rows = 4 if self.case.kind == "cached" else 4 + rank
        sides = [paddle.to_tensor(rng.randn(rows, WIDTH).astype("float32")) for _ in range(2)]
        return tuple(sides) if self.case.kind == "cached" else sides[0]

    def weights(self) -> dict[str, np.ndarray]:
        """All parameters on the host."""
        return {name: one.numpy() for name, one in self.model.state_dict().items()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both have the same names and, bit by bit, the same values."""
    return one.keys() == other.keys() and all(
        np.array_equal(np.asarray(value), np.asarray(other[name])) for name, value in one.items()
    )


def difference(one: Training, other: Training) -> str:
    """What of two runs differs; empty where nothing does."""
    if one.figures != other.figures:
        return f"losses and norms {one.figures} and {other.figures}"
    if not equal(one.weights(), other.weights()):
        return "weights"
    mine, theirs = one.step.state_dict()["optimizer"], other.step.state_dict()["optimizer"]
    return "" if equal(mine, theirs) else f"optimizer states {sorted(mine)}, {sorted(theirs)}"
