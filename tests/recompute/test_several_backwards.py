"""Several backwards through one call (``retain_graph=True``) share its second forward."""

from __future__ import annotations

import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import RecomputeConfig, apply_recompute, keep, recompute
from paddle_recompute._paddle import memory
from paddle_recompute.errors import RecomputeError
from tests.recompute.contract import Run, Seen, case, leaf

WIDTH = 4


class Counted(paddle.nn.Layer):
    """A block with dropout that counts its forwards."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(width, width)
        self.runs = 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.runs += 1
        return F.dropout(self.linear(x).tanh().exp(), 0.3)


@case("two backwards")
def test_two_losses(run: Run) -> Seen:
    layers, x = [Counted(), Counted()], leaf(3, WIDTH)
    y = run(layers[1], run(layers[0], x * 2))
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return {"x": x, "layers": [layer.linear for layer in layers]}


@case("a double backward and a backward")
def test_double_backward(run: Run) -> Seen:
    linear, x = paddle.nn.Linear(WIDTH, WIDTH), leaf(3, WIDTH)
    y = run(lambda x: linear(x).tanh() * x, x * 2)
    (gradient,) = paddle.grad(y.square().sum(), x, create_graph=True)
    (gradient.square().sum() + y.sum()).backward()
    return {"x": x, "linear": linear}


@case("two backwards through nested calls with kept parts")
def test_nested(run: Run) -> Seen:
    layer, x = Counted(), leaf(3, WIDTH)

    def outer(x: paddle.Tensor) -> paddle.Tensor:
        return keep(paddle.exp, run(layer, x.tanh())) * keep(layer, x)

    y = run(outer, x * 2)
    y.sum().backward(retain_graph=True)
    (y * y).sum().backward(retain_graph=True)
    y.mean().backward()
    return {"x": x, "layer": layer.linear}


@case("backwards of two branches of one call")
def test_branches(run: Run) -> Seen:
    layer, x = Counted(), leaf(3, WIDTH)

    def two(x: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
        h = layer(x)
        return h.exp(), h.tanh()

    first, second = run(two, x * 2)
    first.sum().backward(retain_graph=True)
    second.square().sum().backward()
    return {"x": x, "layer": layer.linear}


def test_the_function_runs_once_more_for_all_of_them() -> None:
    layers = [Counted(), Counted()]
    y = leaf(3, WIDTH) * 2
    for layer in layers:
        y = recompute(layer, y)
    for _ in range(3):
        y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert [layer.runs for layer in layers] == [2, 2]


def test_what_they_hold_and_until_when() -> None:
    model = paddle.nn.Sequential(*[Counted(64) for _ in range(3)])
    apply_recompute(model, RecomputeConfig(checkpoints=["*"]))
    x = leaf(64, 64)

    def backward(y: paddle.Tensor, retain_graph: bool) -> int:
        y.sum().backward(retain_graph=retain_graph)
        x.clear_gradient()
        model.clear_gradients()
        return memory.current_bytes()

    y = model(x)
    backward(y, False)
    del y
    before = memory.current_bytes()
    y = model(x)
    forward = memory.current_bytes()
    # Of each call the outputs of tanh and exp, and the mask, of one byte per element.
    assert backward(y, True) - forward == 3 * 64 * 64 * (4 + 4 + 1)
    assert backward(y, True) - forward == 3 * 64 * 64 * (4 + 4 + 1)
    backward(y, False)
    del y
    assert memory.current_bytes() == before
    y = model(x)
    backward(y, True)
    del y
    assert memory.current_bytes() == before


def test_a_tensor_that_changes_between_the_backwards_is_refused() -> None:
    layer = Counted()
    y = recompute(layer, leaf(3, WIDTH) * 2)
    y.sum().backward(retain_graph=True)
    with paddle.no_grad():
        layer.linear.weight.scale_(2.0)
    with pytest.raises(RecomputeError, match="changed in place"):
        y.sum().backward()


def test_a_second_forward_that_fails_can_run_again() -> None:
    layer, fails = Counted(), iter([False, True, False])
    layer.linear.register_forward_post_hook(lambda *_: 1 / 0 if next(fails) else None)
    y = recompute(layer, leaf(3, WIDTH) * 2)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward(retain_graph=True)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert layer.runs == 3
