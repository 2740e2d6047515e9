"""What a recomputed function may return."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import paddle

from paddle_recompute import recompute
from tests.recompute.contract import Run, Seen, case, leaf, loss_of, step
from tests.recompute.test_inputs import Mix

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Result:
    hidden: paddle.Tensor
    cache: paddle.Tensor | None
    steps: int = 3


SHAPES: dict[str, Any] = {
    "a tuple": lambda y: (y, y.exp()),
    "a tuple of one tensor": lambda y: (y,),
    "a list": lambda y: [y, y.exp()],
    "a dict": lambda y: {"b": y, "a": y.exp()},
    "an ordered dict": lambda y: collections.OrderedDict(b=y, a=y.exp()),
    "nested containers": lambda y: {"pair": (y, [y.exp(), {"deep": y.tanh()}]), "none": None},
    "a named tuple": lambda y: Pair(y, y.exp()),
    "a frozen dataclass": lambda y: Result(y, y.exp()),
    "a tensor and None": lambda y: (y, None),
    "None first": lambda y: (None, y),
    "numbers, strings and flags": lambda y: (y, 7, 0.5, "ok", True),
    "integer tensors": lambda y: (y, y.argmax(-1), y.argsort(-1)),
    "a boolean tensor": lambda y: (y > 0, y),
    "the same tensor twice": lambda y: (y, [y]),
    "a detached tensor": lambda y: (y, y.detach()),
    "a view of another output": lambda y: (y, y[:, 1:], y.reshape([-1])),
    "an empty tuple beside a tensor": lambda y: ((), y),
    "a tensor that was made with stop_gradient": lambda y: (y, paddle.ones([2])),
}


@case("{shape} returned", shape=list(SHAPES))
def test_shape(run: Run, shape: str) -> Seen:
    return step(run, Mix(lambda linear, x: SHAPES[shape](linear(x).tanh())), leaf(3, 4))


@case("nothing returned", has_gradients=False)
def test_nothing(run: Run) -> Seen:
    return step(run, Mix(lambda linear, x: None), leaf(3, 4))


@case("an input without gradient passed through: a mask")
def test_mask_passed_through(run: Run) -> Seen:
    mask = paddle.to_tensor([[1.0], [0.0], [1.0]])
    found = step(run, Mix(lambda linear, x, mask: (linear(x) * mask, mask)), leaf(3, 4), mask)
    return {**found, "is it the same object": found["outputs"][1] is mask}


PASSED: dict[str, tuple[Any, Any]] = {
    "an integer input passed through": (
        lambda linear, x, ids: (linear(x)[ids], ids),
        lambda: (leaf(3, 4), paddle.to_tensor([2, 0, 1])),
    ),
    "an input with gradient passed through": (
        lambda linear, x: (linear(x).tanh(), x),
        lambda: (leaf(3, 4),),
    ),
    "nothing but an input passed through": (lambda linear, x: x, lambda: (leaf(3, 4),)),
}


@case("{what}", what=list(PASSED))
def test_passed_through(run: Run, what: str) -> Seen:
    forward, make_inputs = PASSED[what]
    return step(run, Mix(forward), *make_inputs())


@case("a parameter returned")
def test_parameter(run: Run) -> Seen:
    block = Mix(lambda linear, x: (linear(x).tanh(), linear.weight))
    found = step(run, block, leaf(3, 4))
    return {**found, "is it the same object": found["outputs"][1] is block.linear.weight}


@case("the inputs' container returned")
def test_container_passed_through(run: Run) -> Seen:
    x, y = leaf(3, 4), leaf(3, 4)
    pair = [x * 2, y * 3]
    out = run(lambda pair: pair, pair)
    loss_of(out).backward()
    return {"x": x, "y": y, "is it the same object": out is pair}


class TwoBranches(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.used = paddle.nn.Linear(4, 4)
        self.unused = paddle.nn.Linear(4, 4)

    def forward(self, x: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
        return self.half(x), self.unused(x).tanh()

    def half(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.used(x).tanh()


UNUSED: dict[str, Any] = {
    "an output that the loss does not use": lambda run, block, x: run(block, x * 2)[0],
    "a parameter that the function does not use": lambda run, block, x: run(block.half, x * 2),
    "no output that the loss uses": lambda run, block, x: (run(block, x * 2), x)[1],
}


@case("{what}", what=list(UNUSED))
def test_unused(run: Run, what: str) -> Seen:
    block, x = TwoBranches(), leaf(3, 4)
    y = UNUSED[what](run, block, x)
    y.square().sum().backward()
    return {"y": y, "block": block, "x": x}


AS_TARGET: dict[str, Any] = {
    "only integers returned": (lambda y: y.argmax(0), lambda x, best: x[best] ** 2),
    "only tensors without gradient returned": (
        lambda y: y.tanh().detach(),
        lambda x, target: (x - target) ** 2,
    ),
}


@case("{what}", what=list(AS_TARGET))
def test_without_gradient(run: Run, what: str) -> Seen:
    block, x = paddle.nn.Linear(4, 4), leaf(3, 4)
    target_of, losses = AS_TARGET[what]
    target = run(lambda x: target_of(block(x)), x * 2)
    losses(x, target).sum().backward()
    return {"target": target, "x": x, "block": block}


@case("an output that the caller changes in place")
def test_output_changed_by_the_caller(run: Run) -> Seen:
    block, x = paddle.nn.Linear(4, 4), leaf(3, 4)
    y = run(block, x * 2)
    y.add_(paddle.ones([4]))
    y.sum().backward()
    return {"y": y, "x": x, "block": block}


@case("an output used twice, with the way back to the block each time")
def test_output_used_twice(run: Run) -> Seen:
    block, x = paddle.nn.Linear(4, 4), leaf(3, 4)
    y = run(lambda x: block(x).tanh(), x * 2)
    (y.exp().sum() + (y * x).sum()).backward()
    return {"y": y, "x": x, "block": block}


@case("the first input of {n} blocks in a row, then each output", n=[3])
def test_chain(run: Run, n: int) -> Seen:
    blocks = paddle.nn.LayerList(
        [paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Tanh()) for _ in range(n)]
    )
    x = leaf(3, 4)
    outputs = [x * 2]
    for block in blocks:
        outputs.append(run(block, outputs[-1]))
    loss_of(outputs).backward()
    return {"outputs": outputs, "x": x, "blocks": blocks}


def test_an_output_keeps_its_place_in_the_plain_graph() -> None:
    """The operator that made the output is in the graph itself, not hidden in a node."""
    y = recompute(lambda x: x.tanh(), leaf(3) * 2)
    assert "Tanh" in y.grad_fn.name()


def test_containers_are_the_functions_own() -> None:
    made: list[Any] = []

    def function(x: paddle.Tensor) -> Any:
        made.append(SHAPES["nested containers"](x.tanh()))
        return made[-1]

    assert recompute(function, leaf(3, 4)) is made[0]
