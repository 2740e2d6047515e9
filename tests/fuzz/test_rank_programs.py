"""Random training programs on real ranks: every gradient is the mean of those gathered by hand.

A program is a few steps of up to three micro-batches over a few parameters. It draws which part a
rank uses in which micro-batch (heads, branches, unused parts, parts used twice or by one rank
alone), whether a step's backwards are one or many, which contexts they run in, what is frozen and
unfrozen or added between steps, whether gradients are changed inside of ``last_backward``, and how
the synchronization is set up. The same program runs a second time on copies of the parameters
without any synchronization; the ranks exchange those gradients and average them in Python.

With ``FUZZ_RANKS=3`` it runs on three ranks. A failure prints the seed and the program::

    FUZZ_SEED=123 FUZZ_PROGRAMS=1 python -m pytest tests/fuzz/test_rank_programs.py
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute.distributed import values_of_ranks
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.recompute import recompute
from tests.fuzz import budget
from tests.ranks import run_ranks

SMALLEST = 1 if paddle.__version__.startswith("2.") else 0  # 2.6 makes no empty parameter
RANKS = int(os.environ.get("FUZZ_RANKS", 2))
TOLERANCE = 0.0 if RANKS == 2 else 1e-6
"""Two numbers have one sum; three have one for each order in which they are added."""

Use = tuple[int, float, bool]
"""A part, the factor of its input, and whether it is recomputed."""


@dataclass(frozen=True)
class MicroBatch:
    """What each rank does.

    Attributes:
        uses: The parts that each rank uses; none: it runs no backward.
        one_by_one: Whether each use has a backward of its own.
        context: ``no_sync``, ``none`` or ``last``; None: an empty ``last_backward`` follows.
    """

    uses: tuple[tuple[Use, ...], ...]
    one_by_one: bool
    context: str


@dataclass(frozen=True)
class Step:
    """One optimizer step, without the optimizer.

    Attributes:
        micro: The last one runs inside of ``last_backward``, unless all contexts are others.
        frozen: The parts that have ``stop_gradient`` in it.
        add: Whether a part is added to the Layer before it.
        change: How gradients are changed inside of ``last_backward``, on which ranks.
        clear: Whether the gradients are cleared behind it.
    """

    micro: tuple[MicroBatch, ...]
    frozen: frozenset[int]
    add: bool
    change: tuple[str, tuple[bool, ...]]
    clear: bool


@dataclass(frozen=True)
class Program:
    sizes: tuple[int, ...]
    as_layer: bool
    options: dict[str, Any] = field(hash=False)
    steps: tuple[Step, ...] = ()


class Parts(paddle.nn.Layer):
    def __init__(self, sizes: tuple[int, ...], number: int) -> None:
        super().__init__()
        for index, size in enumerate(sizes[:number]):
            self.add(index, size)

    def add(self, index: int, size: int) -> None:
        start = paddle.linspace(-1.0, 1.0, size) if size else paddle.zeros([0])
        weight = self.create_parameter(
            [size], default_initializer=paddle.nn.initializer.Assign(start)
        )
        self.add_parameter(f"part{index}", weight)


def draw(seed: int, ranks: int) -> Program:
    rng = np.random.default_rng([20_000, seed])

    def chance(probability: float) -> bool:
        return bool(rng.random() < probability)

    first = int(rng.integers(2, 6))
    as_layer = chance(0.5)
    num_steps = int(rng.integers(2, 6))
    heads = chance(0.3)  # one part for each micro-batch, as with several tasks
    changes, freezes = chance(0.15), chance(0.3)
    number, steps = first, []
    frozen: frozenset[int] = frozenset()
    for _ in range(num_steps):
        add = as_layer and chance(0.15)
        number += add
        if freezes and chance(0.6):
            frozen = frozenset(int(i) for i in range(number) if chance(0.3))
        micro = []
        count = int(rng.integers(1, 4))
        for place in range(count):
            uses = []
            alike = chance(0.6)
            for rank in range(ranks):
                if rank and alike:
                    uses.append(uses[0])
                    continue
                parts = [place % number] if heads else list(range(number))
                own = [
                    (part, float(rng.integers(1, 9)) / 4, chance(0.2))
                    for part in parts
                    if part not in frozen and chance(1.0 if heads else 0.6)
                ]
                if chance(0.2) and own:
                    own.append(own[0])
                rng.shuffle(own)
                uses.append(tuple((int(p), float(f), bool(r)) for p, f, r in own))
            last = place == count - 1
            context = "last" if last and not chance(0.1) else str(rng.choice(["no_sync", "none"]))
            micro.append(MicroBatch(tuple(uses), chance(0.3), context))
        kind = str(rng.choice(["scale", "assign"])) if changes and chance(0.7) else "none"
        change = (kind, tuple(chance(0.7) for _ in range(ranks)))
        steps.append(Step(tuple(micro), frozen, add, change, chance(0.9)))
    sizes = tuple(
        int(rng.choice([SMALLEST, 1, 3, 40, 200], p=[0.03, 0.2, 0.3, 0.3, 0.17]))
        for _ in range(number)
    )
    options = {
        "mode": str(rng.choice(["overlap", "fused"], p=[0.7, 0.3])),
        "find_unused_parameters": chance(0.3),
        "first_bucket_bytes": int(rng.choice([1, 200, 2000])),
        "bucket_bytes": int(rng.choice([1, 600, 2000])),
        "check_every": 1 if chance(0.1) else None,
    }
    return Program(sizes, as_layer, options, tuple(steps))


def backward_of(parts: Parts, micro: MicroBatch) -> None:
    weights = parts.parameters()

    def term(use: Use) -> paddle.Tensor:
        index, factor, is_recomputed = use

        def compute(x: paddle.Tensor) -> paddle.Tensor:
            return paddle.tanh(weights[index] * x).sum()

        x = paddle.to_tensor(factor * (dist.get_rank() + 1))
        return recompute(compute, x) if is_recomputed else compute(x)

    terms = [term(use) for use in micro.uses[dist.get_rank()]]
    if micro.one_by_one:
        for one in terms:
            one.backward()
    elif terms:
        paddle.add_n(terms).backward() if len(terms) > 1 else terms[0].backward()


@paddle.no_grad()
def change_gradients(parts: Parts, change: tuple[str, tuple[bool, ...]]) -> None:
    kind, ranks = change
    if kind == "none" or not ranks[dist.get_rank()]:
        return
    for weight in parts.parameters():
        if weight.grad is not None and weight.grad.size:
            if kind == "scale":
                weight.grad.scale_(0.5)
            else:
                paddle.assign(weight.grad * 0.5, weight.grad)


def prepare(parts: Parts, program: Program, step: Step) -> None:
    if step.add:
        number = len(parts.parameters())
        parts.add(number, program.sizes[number])
    for index, weight in enumerate(parts.parameters()):
        weight.stop_gradient = index in step.frozen


def run_step(parts: Parts, step: Step, sync: GradientSync | None) -> None:
    nothing = contextlib.nullcontext
    synchronized = False
    for micro in step.micro:
        if sync is not None and micro.context == "last":
            synchronized = True
            with sync.last_backward():
                backward_of(parts, micro)
                change_gradients(parts, step.change)
            continue
        with sync.no_sync() if sync is not None and micro.context == "no_sync" else nothing():
            backward_of(parts, micro)
    if sync is None:
        change_gradients(parts, step.change)
    elif not synchronized:
        with sync.last_backward():
            change_gradients(parts, step.change)


def mean_by_hand(parts: Parts) -> list[np.ndarray | None]:
    own = [None if w.grad is None else w.grad.numpy().tolist() for w in parts.parameters()]
    everywhere = values_of_ranks(own, "gradients by hand")
    means = []
    for theirs in zip(*everywhere, strict=True):
        there = [np.array(one, "float32") for one in theirs if one is not None]
        scale = np.float32(1.0 / len(theirs))
        means.append(np.sum([one * scale for one in there], 0, "float32") if there else None)
    return means


def take(parts: Parts, means: list[np.ndarray | None]) -> None:
    for weight, mean in zip(parts.parameters(), means, strict=True):
        weight.clear_gradient(False)
        if mean is not None:
            weight.grad = paddle.to_tensor(mean)


def run_program(program: Program) -> None:
    first = len(program.sizes) - sum(step.add for step in program.steps)
    parts, twin = (Parts(program.sizes, first) for _ in range(2))
    prepared = program.steps[0]
    if prepared.frozen:  # the first step's are frozen from the beginning, or unfrozen later
        for index, weight in enumerate(parts.parameters()):
            weight.stop_gradient = index in prepared.frozen
    sync = GradientSync(parts if program.as_layer else parts.parameters(), **program.options)
    for number, step in enumerate(program.steps):
        for one in (parts, twin):
            prepare(one, program, step)
        run_step(parts, step, sync)
        run_step(twin, step, None)
        means = mean_by_hand(twin)
        for index, (weight, mean) in enumerate(zip(parts.parameters(), means, strict=True)):
            if not weight.size:
                continue  # an empty gradient or none: it is the same
            found = None if weight.grad is None else weight.grad.numpy()
            where = f"gradient of part {index} in step {number}: {found}, by hand {mean}"
            assert (found is None) == (mean is None), where
            if mean is not None:
                assert np.allclose(found, mean, rtol=TOLERANCE, atol=TOLERANCE), where
        take(twin, means)
        if step.clear:
            for one in (*parts.parameters(), *twin.parameters()):
                one.clear_gradient(False)


def run_programs(first: int, count: int) -> int:
    num_ranks = dist.get_world_size()
    return budget.each_program(lambda seed: draw(seed, num_ranks), run_program, first, count, 100)


@pytest.mark.timeout(24 * 3600)
def test_every_gradient_is_the_mean_of_those_gathered_by_hand() -> None:
    count = budget.examples(17)
    print(f"seeds {budget.seed()} to {budget.seed() + count - 1}, {RANKS} ranks")
    done = run_ranks(run_programs, RANKS, timeout=60 + 2 * count, first=budget.seed(), count=count)
    assert done == [count] * RANKS
