"""Exceptions that the caller of a block catches: the rest of the step is as in plain calls."""

from __future__ import annotations

import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import RecomputeConfig, apply_recompute, recompute
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import is_recomputing
from tests.recompute.contract import Run, Seen, assert_as_plain, case, leaf


class Odd(Exception):
    """What a block raises."""


class Block(paddle.nn.Layer):
    """Raises at the end of the calls whose numbers are `bad`."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.linear, self.norm = paddle.nn.Linear(4, 4), paddle.nn.BatchNorm1D(4)
        self.bad, self.calls = bad, 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        call = self.calls
        if not is_recomputing():
            self.calls += 1
        y = F.dropout(self.norm(self.linear(x)).tanh(), 0.2)
        if call in self.bad and not is_recomputing():
            raise Odd
        return y


class Chain(paddle.nn.Layer):
    """Leaves out a block that raises, or calls it `again`."""

    def __init__(self, bad: list[set[int]], again: bool) -> None:
        super().__init__()
        self.blocks = paddle.nn.LayerList([Block(calls) for calls in bad])
        self.again = again

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except Odd:
                if self.again:
                    x = block(x)
        return x


@pytest.mark.parametrize("again", [False, True], ids=["left out", "called again"])
@pytest.mark.parametrize("bad", [{0}, {1, 2}], ids=str)
@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_block_of_a_chain(bad: set[int], again: bool, retain_graph: bool) -> None:

    def outcome(enable: bool) -> Seen:
        model = Chain([{0} if number in bad else set() for number in range(4)], again)
        config = RecomputeConfig(enable=enable, checkpoints=["blocks.*"])
        apply_recompute(model, config)
        x, outputs = leaf(5, 4), []
        for _ in range(3):  # the first of which is odd
            outputs.append(model(x * 2))
            loss = outputs[-1].square().sum()
            loss.backward(retain_graph=retain_graph)
            if retain_graph:
                loss.backward()
        return {"x": x, "model": model, "outputs": outputs}

    assert_as_plain(outcome, True, False)


@case("a block raises, its caller goes on without it")
def test_caught(run: Run) -> Seen:
    block, other, x = Block({0}), Block(set()), leaf(5, 4)
    up = x * 2
    try:
        y = run(block, up)
    except Odd:
        y = run(other, up)
    z = run(block, y)
    z.sum().backward()
    return {"x": x, "block": block, "other": other, "z": z}


@case("a block catches what an inner block raises")
def test_caught_inside(run: Run) -> Seen:
    first, second, x = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4), leaf(5, 4)

    def raising(x: paddle.Tensor) -> None:
        first(x).tanh()
        raise Odd

    def block(x: paddle.Tensor) -> paddle.Tensor:
        x = F.dropout(x.exp(), 0.3)
        for _ in range(2):
            try:
                run(raising, x)
            except Odd:
                x = run(lambda x: second(x).tanh(), x)
        return x

    y = run(block, x * 2)
    y.sum().backward()
    return {"x": x, "y": y, "first": first, "second": second}


def test_what_a_block_that_raised_has_let_out_cannot_be_differentiated() -> None:
    let_out = []

    def block(x: paddle.Tensor) -> None:
        let_out.append(x.tanh())
        raise Odd

    x = leaf(3, 4)
    with pytest.raises(Odd):
        recompute(block, x)
    for _ in range(2):
        with pytest.raises(RecomputeError, match=r"'test_.*block' raised in its first forward"):
            let_out[0].sum().backward(retain_graph=True)


def test_a_second_forward_that_fails_may_be_tried_again() -> None:
    fails = iter([True])  # a list would be given back what it held in the first forward

    def block(x: paddle.Tensor) -> paddle.Tensor:
        y = x.tanh()
        if is_recomputing() and next(fails, False):
            raise Odd
        return y.exp() * y

    x = leaf(3, 4)
    loss = recompute(block, x).sum()
    with pytest.raises(Odd):
        loss.backward(retain_graph=True)
    loss.backward()
    gradient = x.grad.numpy()
    x.clear_gradient()
    block(x).sum().backward()
    assert (gradient == x.grad.numpy()).all()


@pytest.mark.parametrize("name", ["mask", "norm"])
def test_what_a_forward_holds_for_a_while_goes_when_the_second_one_raises(name: str) -> None:
    class Block(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.mask: object = None
            self.norm = paddle.nn.LayerNorm(4)

        def forward(self, x: paddle.Tensor) -> paddle.Tensor:
            before = getattr(self, name)
            setattr(self, name, object() if name == "mask" else paddle.nn.Identity())
            y = x.tanh()
            if is_recomputing():
                raise Odd
            setattr(self, name, before)
            return y.exp() * y

    block, x = Block(), leaf(3, 4)
    before = getattr(block, name)
    loss = recompute(block, x).sum()
    with pytest.raises(Odd):
        loss.backward()
    assert getattr(block, name) is before
