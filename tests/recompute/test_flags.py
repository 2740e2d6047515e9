"""``stop_gradient`` of the first forward holds in the second, whatever it is by then."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import paddle
import pytest

from paddle_recompute import recompute
from tests.recompute.contract import Run, Seen, case, leaf, loss_of

Tensor = paddle.Tensor


def freeze(*values: Any, frozen: bool = True) -> None:
    for value in values:
        for one in value.parameters() if isinstance(value, paddle.nn.Layer) else [value]:
            one.stop_gradient = frozen


class TwoAdapters(paddle.nn.Layer):
    """The sum of two adapters, each of an input of its own, one of which is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) + self.b(y)


@case("adapters switched between forward and backward: the trained half of a block is exchanged")
def test_adapters(run: Run) -> Seen:
    block, x, y = TwoAdapters(), leaf(3, 4, stop_gradient=True), leaf(3, 4, stop_gradient=True)
    freeze(block.b)
    loss = loss_of(run(block, x, y))
    freeze(block.a)
    freeze(block.b, frozen=False)
    loss.backward()
    later = loss_of(run(block, x, y))  # the other half is trained
    later.backward()
    return {"loss": loss, "later": later, "block": block, "x": x, "y": y}


def summed(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ a + y @ b).tanh()


PAIRS: dict[str, Callable[[Tensor, Tensor], Callable[..., Tensor]]] = {
    "in a closure": lambda a, b: lambda x, y: summed(x, y, a, b),
    "in a list": lambda a, b: (lambda pair: lambda x, y: summed(x, y, *pair))([a, b]),
    "in an object": lambda a, b: (lambda pair: lambda x, y: summed(x, y, pair.a, pair.b))(
        types.SimpleNamespace(a=a, b=b)
    ),
    "that are arguments": lambda a, b: summed,
}


def exchanged(run: Run, where: str, kind: str) -> Seen:
    is_parameter = kind == "parameters"
    sources = [
        paddle.create_parameter([4, 4], "float32") if is_parameter else leaf(4, 4) for _ in range(2)
    ]
    a, b = [source * 2 for source in sources] if kind == "results" else sources
    x, y = leaf(3, 4, stop_gradient=True), leaf(3, 4, stop_gradient=True)
    b.stop_gradient = True
    given = [a, b] if where == "that are arguments" else []
    loss = loss_of(run(PAIRS[where](a, b), x, y, *given))
    a.stop_gradient, b.stop_gradient = True, False
    loss.backward()
    return {"loss": loss, "a": a, "b": b, "sources": sources, "x": x, "y": y}


test_pairs = case(
    "{kind} {where}, frozen and unfrozen between forward and backward",
    where=list(PAIRS),
    kind=["parameters", "tensors", "results"],
    num_listed=6,
)(exchanged)


class FreezesItself(paddle.nn.Layer):
    """Its forward says what is trained, as a model of several tasks does."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters, self.task = TwoAdapters(), 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for number, adapter in enumerate([self.adapters.a, self.adapters.b]):
            for one in adapter.parameters():
                one.stop_gradient = number != self.task
        return self.adapters(x, y)


@case("a forward that sets stop_gradient itself, with the user in between")
def test_a_forward_that_freezes(run: Run) -> Seen:
    block, x, y, losses, flags = FreezesItself(), leaf(3, 4), leaf(3, 4), [], []
    for task in (0, 1, 0):
        block.task = task
        losses.append(loss_of(run(block, x * 2, y * 2)))
        freeze(block, frozen=False)
        losses[-1].backward()
        flags.append([one.stop_gradient for one in block.parameters()])
    return {"losses": losses, "block": block, "x": x, "y": y, "flags": flags}


@pytest.mark.parametrize("fails", [False, True])
def test_flags_are_those_of_now_after_the_backward(fails: bool) -> None:
    block, calls = TwoAdapters(), []

    def function(x: Tensor) -> Tensor:
        calls.append(block.b.weight.stop_gradient)
        if fails and len(calls) == 2:
            raise KeyError("planted")
        return block(x, x)

    loss = loss_of(recompute(function, leaf(3, 4)))
    freeze(block.b)
    if fails:
        with pytest.raises(KeyError):
            loss.backward()
    else:
        loss.backward()
    assert calls == [False, False]
    assert [one.stop_gradient for one in block.parameters()] == [False, False, True, True]
