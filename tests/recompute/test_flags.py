"""``stop_gradient`` of the first forward holds in the second, whatever it is by then."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import paddle
import pytest

from paddle_recompute import ContrastiveLoss, GradCache, OffloadSequential, recompute
from paddle_recompute.offload import resident
from tests.recompute.contract import Run, Seen, assert_as_plain, case, leaf, loss_of

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


def test_in_an_offloaded_chain() -> None:
    class Both(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.adapters = TwoAdapters()

        def forward(self, x: Tensor) -> Tensor:
            return self.adapters(x, x * 2)

    def outcome(is_offloaded: bool) -> Seen:
        blocks, x = [Both(), Both()], leaf(3, 4)
        for block in blocks:
            freeze(block.adapters.b)
        chain: Any = paddle.nn.Sequential(*blocks)
        if is_offloaded:
            chain = OffloadSequential(chain, num_shards=2, offload="host")
        loss = loss_of(chain(x * 2))
        for block in blocks:
            freeze(block.adapters.a)
            freeze(block.adapters.b, frozen=False)
        loss.backward()
        with resident(chain) if is_offloaded else contextlib.nullcontext():
            gradients = [p.grad if p.grad is None else p.grad.clone() for p in chain.parameters()]
        return {"loss": loss, "x": x, "gradients": gradients}

    assert_as_plain(outcome, True, False)


def test_in_the_gradient_cache() -> None:
    """The encoder freezes a half of itself, another one in each step."""
    block, x = FreezesItself(), paddle.randn([4, 4])
    cache = GradCache(lambda x: block(x, x * 2), ContrastiveLoss(0.1), chunk_size=2)
    cache.backward(x, x * 3)
    trained = [one.grad is not None for one in block.parameters()]
    assert trained == [True, True, False, False]
    block.clear_gradients()
    block.task = 1
    cache.backward(x, x * 3)
    assert block.adapters.b.weight.grad.abs().sum() > 0
    wanted = block.adapters.b.weight.grad.clone()
    block.adapters.b.clear_gradients()
    ContrastiveLoss(0.1)(block(x, x * 2), block(x * 3, x * 6)).backward()
    # float32 sums over the rows of two chunks.
    assert paddle.allclose(block.adapters.b.weight.grad, wanted, rtol=1e-4, atol=1e-6)


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
