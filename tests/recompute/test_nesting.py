"""Recompute inside recompute, to any depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
import pytest
from paddle.distributed.fleet.utils import recompute as paddles_own
from paddle.nn import functional as F

from paddle_recompute import recompute
from tests.recompute.contract import Run, Seen, assert_as_plain, case, leaf, plain


class Nest(paddle.nn.Layer):
    """`depth` blocks, each called from inside the one before it."""

    def __init__(self, depth: int, run: Run = plain, norm: Any = paddle.nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(4)
        self.linear = paddle.nn.Linear(4, 4)
        self.inner = Nest(depth - 1, run, norm) if depth > 1 else None
        self.calls = 0
        self._run = run

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        x = F.dropout(self.norm(self.linear(x)).tanh(), 0.2)
        if self.inner is not None:
            x = self._run(self.inner, x * 2)
        return x.exp() * 0.5

    def counts(self) -> list[int]:
        """Calls of this block and of those inside it, outermost first."""
        return [self.calls, *(self.inner.counts() if self.inner is not None else [])]


@case("nested {depth} deep", depth=[2, 3, 4])
def test_depth(run: Run, depth: int) -> Seen:
    block, x = Nest(depth, run), leaf(6, 4)
    y = run(block, x * 2)
    y.sum().backward()
    return {"y": y, "x": x, "block": block}


@case("nested 3 deep, with BatchNorm at every level")
def test_batch_norm(run: Run) -> Seen:
    block, x = Nest(3, run, paddle.nn.BatchNorm1D), leaf(6, 4)
    y = run(block, x * 2)
    y.sum().backward()
    return {"y": y, "x": x, "block": block}


@case("nested {depth} deep, two calls and two steps", depth=[2, 3])
def test_two_calls(run: Run, depth: int) -> Seen:
    block, x = Nest(depth, run), leaf(6, 4)
    for _ in range(2):
        y = run(block, run(block, x * 2))
        y.sum().backward()
    return {"y": y, "x": x, "block": block}


Outer = Callable[[paddle.Tensor], paddle.Tensor]


def two_inside_one(run: Run, first: Nest, second: Nest) -> Outer:
    return lambda x: run(second, run(first, x).tanh()) + run(first, x)


def only_nesting(run: Run, first: Nest, second: Nest) -> Outer:
    return lambda x: run(lambda x: run(first, x), x)


def unused(run: Run, first: Nest, second: Nest) -> Outer:
    def outer(x: paddle.Tensor) -> paddle.Tensor:
        y = first(x)
        run(second, y)
        return y

    return outer


def without_gradients(run: Run, first: Nest, second: Nest) -> Outer:
    def outer(x: paddle.Tensor) -> paddle.Tensor:
        with paddle.no_grad():
            target = run(first, x)
        return (run(second, x) - target).square()

    return outer


OUTER: dict[str, Callable[[Run, Nest, Nest], Outer]] = {
    "two blocks inside one": two_inside_one,
    "an inner block that does nothing but call another": only_nesting,
    "an inner block whose output is not used": unused,
    "an inner block under no_grad": without_gradients,
}


@case("{what}", what=list(OUTER))
def test_inner_blocks(run: Run, what: str) -> Seen:
    first, second, x = Nest(1), Nest(1), leaf(6, 4)
    y = run(OUTER[what](run, first, second), x * 2)
    y.sum().backward()
    return {"y": y, "x": x, "first": first, "second": second}


@case("an inner block with nested inputs and outputs")
def test_nested_values(run: Run) -> Seen:
    linear, x, scale = paddle.nn.Linear(4, 4), leaf(6, 4), leaf(6, 4)

    def inner(batch: dict[str, Any], *, factor: float) -> dict[str, Any]:
        return {"y": linear(batch["pair"][0]) * batch["pair"][1] * factor, "none": None}

    def outer(x: paddle.Tensor, scale: paddle.Tensor) -> paddle.Tensor:
        return run(inner, {"pair": (x.tanh(), scale)}, factor=0.5)["y"].exp()

    y = run(outer, x * 2, scale)
    y.sum().backward()
    return {"y": y, "x": x, "scale": scale, "linear": linear}


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_forwards_are_counted(depth: int) -> None:
    """Each level runs once more than the one around it: that one's repetition runs it too."""
    block = Nest(depth, recompute)
    recompute(block, leaf(6, 4)).sum().backward()
    assert block.counts() == [level + 2 for level in range(depth)]


@pytest.mark.parametrize(
    "runs", [(recompute, paddles_own), (paddles_own, recompute)], ids=["outside", "inside"]
)
def test_together_with_paddles_own(runs: tuple[Run, Run]) -> None:
    """A model that uses Paddle's recompute inside may be recomputed, and the other way round."""

    def outcome(runs: tuple[Run, Run]) -> Seen:
        outer, inner = runs
        block, x = Nest(1), leaf(6, 4)
        outer(lambda x: inner(block, x.tanh()).tanh(), x * 2).sum().backward()
        return {"x": x, "block": block.linear}

    assert_as_plain(outcome, runs, (plain, plain))
