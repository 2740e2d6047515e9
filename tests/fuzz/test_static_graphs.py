"""Random static graphs train to the same bits with recompute and without.

FUZZ_PROGRAMS=2000 FUZZ_SEED=0 python -m pytest tests/fuzz/test_static_graphs.py -s
"""

from __future__ import annotations

import contextlib
import functools
import random
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute._paddle.static.training import in_program_order
from paddle_recompute.errors import StaticGraphError
from tests.fuzz import budget
from tests.fuzz.static_programs import Graph
from tests.static_graph.models import Run, executor_in_place, static_mode, train

LONGEST = 14
REFUSED = (RuntimeError, ValueError, TypeError, StaticGraphError)
"""What Paddle raises where it cannot build or run a graph, and what we raise."""


def run(number: int, length: int, *, recomputes: bool, in_place: bool = True) -> tuple[Run, Graph]:
    """Train graph `number` for three steps of SGD."""
    built: list[Graph] = []

    def build() -> Any:
        built.append(Graph(number, length, wraps=recomputes))
        return built[-1].build()

    names: list[str] | None = None
    drawn = random.Random(number)
    # Branches that draw random numbers, or that are written to, have no order of their own.
    in_order = drawn.random() < 0.5 or sketch(number, length).needs_order
    if recomputes:
        names = []
        if drawn.random() < 0.2:
            names = [name for name in sketch(number, length).names if drawn.random() < 0.5]
    with contextlib.ExitStack() as stack:
        if in_order:
            stack.enter_context(in_program_order())
        stack.enter_context(executor_in_place(in_place))
        trained = train(build, names, make_optimizer=lambda: paddle.optimizer.SGD(0.1))
    return trained, built[-1]


@functools.lru_cache(maxsize=2)
def sketch(number: int, length: int) -> Graph:
    """The graph, built and thrown away."""
    graph = Graph(number, length, wraps=False)
    with (
        static_mode(),
        paddle.utils.unique_name.guard(),
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
    ):
        graph.build()
    graph.values.clear()
    graph.layers.clear()
    return graph


def difference(one: Run, other: Run) -> str | None:
    """Where two runs first differ, in words."""
    if not np.array_equal(one.losses, other.losses, equal_nan=True):
        return f"losses {one.losses} and {other.losses}"
    for step, (gradients, theirs) in enumerate(zip(one.gradients, other.gradients, strict=True)):
        if gradients.keys() != theirs.keys():
            return f"gradients of other parameters: {gradients.keys() ^ theirs.keys()}"
        for name, gradient in gradients.items():
            if not np.array_equal(gradient, theirs[name], equal_nan=True):
                return f"gradient of {name} in step {step}"
    for name, value in (one.parameters | one.moments).items():
        if not np.array_equal(value, (other.parameters | other.moments)[name], equal_nan=True):
            return f"parameter {name}"
    return None


def check(number: int, length: int) -> tuple[str, str | None]:
    """What became of graph `number`: a word, and the difference if there is one that is ours."""
    try:
        plain, _ = run(number, length, recomputes=False)
    except REFUSED:
        return "plain Paddle fails", None
    try:
        ours, _ = run(number, length, recomputes=True)
    except REFUSED as error:
        return "fails", " ".join(str(error).split())[-300:]
    if (found := difference(ours, plain)) is None:
        if not np.isfinite(plain.losses).all():
            return "equal, not finite", None
        again = sum(segment.num_recomputed or 0 for segment in ours.report.segments)
        return ("equal" if again else "equal, nothing recomputed"), None
    if difference(plain, run(number, length, recomputes=False)[0]) is not None:
        return "plain Paddle differs from itself", None
    right, _ = run(number, length, recomputes=False, in_place=False)
    if difference(plain, right) is not None:
        if difference(ours, right) is None:
            return "plain Paddle is wrong, ours is right", None
        return "plain Paddle is wrong, ours too", None
    return "wrong", found


def shortest(number: int, length: int) -> int:
    """The smallest length at which graph `number` is wrong."""
    for shorter in range(1, length):
        with contextlib.suppress(Exception):
            if check(number, shorter)[1] is not None:
                return shorter
    return length


@pytest.mark.timeout(0)
def test_random_graphs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")

    def described(number: int) -> tuple[str, str | None]:
        length = random.Random(number).randint(2, LONGEST)
        word, fault = check(number, length)
        if fault is None:
            return word, None
        smallest = shortest(number, length)
        lines = "; ".join(sketch(number, smallest).lines)
        return word, f"length {smallest} of {length}: {fault}\n    {lines}"

    found = budget.every_number(described, 8)
    assert found["equal"] > sum(found.values()) / 2
