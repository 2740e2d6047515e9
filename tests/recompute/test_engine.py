"""What Paddle's autograd offers besides one backward: it works as in a plain call."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import paddle
import pytest
from paddle.autograd import PyLayer
from paddle.nn import functional as F

from paddle_recompute import recompute
from paddle_recompute._paddle.fleet_recompute import fleet_recompute
from paddle_recompute._paddle.gradients import on_gradient_added
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import recompute_wrapper
from tests.recompute.contract import (
    Run,
    Seen,
    Using,
    case,
    leaf,
    plain,
    state_of_the_process,
    step,
)


class Block(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.dropout(self.linear(x).tanh(), 0.3) * x


# ---------------------------------------------------------------------------------- paddle.grad


Grads = Callable[[Run, Any, paddle.Tensor, paddle.Tensor], Any]
GRADS: dict[str, Grads] = {
    "of the input: the parameters' .grad stays None": lambda run, block, x, z: paddle.grad(
        run(block, x * 2), [x]
    ),
    "of the parameters": lambda run, block, x, z: paddle.grad(run(block, x), block.parameters()),
    "of an input that is not used": lambda run, block, x, z: paddle.grad(
        run(lambda x, z: block(x), x * 2, z), [x, z], allow_unused=True
    ),
    "with gradients of the outputs and inputs that are left out": lambda run, block, x, z: (
        paddle.grad(
            [run(lambda x, z: block(x) + z.exp(), x * 2, z * 2)],
            [x],
            grad_outputs=[leaf(3, 4)],
            no_grad_vars=[z],
        )
    ),
}


@case("paddle.grad {what}", what=list(GRADS), has_gradients=False)
def test_grad(run: Run, what: str) -> Seen:
    block, x, z = Block(), leaf(3, 4), leaf(3, 4)
    if what == "of the parameters":
        block.linear.weight.grad = paddle.ones([4, 4])
    return {"gradients": GRADS[what](run, block, x, z), "x": x, "z": z, "block": block}


@case("paddle.grad first, then backward")
def test_grad_then_backward(run: Run) -> Seen:
    block, x = Block(), leaf(3, 4)
    y = run(block, x * 2)
    gradients = paddle.grad(y, [x], retain_graph=True)
    y.sum().backward()
    return {"gradients": gradients, "x": x, "block": block}


# --------------------------------------------------------------------------------- retain_graph


def three_steps(run: Run, block: Block, x: paddle.Tensor) -> Any:
    return [run(block, x * (2 + number)).square() for number in range(3)]


ORDERS: dict[str, tuple[Callable[..., Any], list[tuple[int, bool]]]] = {
    "backward(retain_graph=True), then backward": (
        lambda run, block, x: [run(block, x * 2)],
        [(0, True), (0, False)],
    ),
    "backward(retain_graph=True) three times, nested blocks": (
        lambda run, block, x: [run(lambda x: run(block, x).tanh(), x * 2)],
        [(0, True), (0, True), (0, False)],
    ),
    "two losses, one after the other, with retain_graph=True": (
        lambda run, block, x: run(lambda x: (block(x), block(x * 2)), x * 2),
        [(0, True), (1, False)],
    ),
    "two blocks of one graph, a backward for each output": (
        lambda run, block, x: [run(block, x * 2), run(lambda x: block(x).exp(), x * 3)],
        [(1, False), (0, False)],
    ),
    "backward in another order than forward, of graphs that overlap in time": (
        three_steps,
        [(1, False), (2, False), (0, False)],
    ),
}
"""The outputs, and of which there is a backward in turn: with ``retain_graph`` or without."""


@case("{what}", what=list(ORDERS))
def test_backwards(run: Run, what: str) -> Seen:
    block, x, found = Block(), leaf(3, 4), []
    outputs_of, order = ORDERS[what]
    outputs = outputs_of(run, block, x)
    for number, retain_graph in order:
        outputs[number].sum().backward(retain_graph=retain_graph)
        found.append(x.grad.clone())
    return {"gradients": found, "x": x, "block": block}


@case("a second backward without retain_graph is an error")
def test_second_backward(run: Run) -> Seen:
    block, x = Block(), leaf(3, 4)
    y = run(block, x * 2)
    y.sum().backward()
    try:
        y.sum().backward()
    except (RuntimeError, SystemError):
        return {"is refused": True, "x": x, "block": block}
    return {"is refused": False, "x": x, "block": block}


@case("one backward for several outputs of several blocks")
def test_one_backward_for_all(run: Run) -> Seen:
    one, other, x = Block(), Block(), leaf(3, 4)
    y, z = run(one, x * 2), run(other, x * 3)
    paddle.autograd.backward([y, z], [leaf(3, 4), leaf(3, 4)])
    return {"x": x, "one": one, "other": other}


# --------------------------------------------------------------------------------- higher order


@case("a gradient of a gradient: create_graph=True", or_error=True)
def test_second_order(run: Run) -> Seen:
    layer, x = paddle.nn.Linear(4, 4), leaf(3, 4)
    y = run(lambda x: layer(x).tanh() ** 3, x * 2)
    (gradient,) = paddle.grad(y, [x], create_graph=True)
    gradient.square().sum().backward()
    return {"gradient": gradient, "x": x, "layer": layer}


@case("a third derivative", or_error=True, has_gradients=False)
def test_third_order(run: Run) -> Seen:
    x = leaf(3)
    y = run(lambda x: x * x * x.tanh(), x * 2)
    for _ in range(3):
        (y,) = paddle.grad(y.sum(), [x], create_graph=True)
    return {"y": y, "x": x}


@case("a gradient penalty inside a step", or_error=True)
def test_gradient_penalty(run: Run) -> Seen:
    one, other = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 1)
    x = leaf(3, 4)
    y = run(lambda x: other(run(lambda x: one(x).tanh(), x)), x * 2)
    (gradient,) = paddle.grad(y.sum(), [x], create_graph=True)
    (y.sum() + (gradient.square().sum(-1).sqrt() - 1).square().mean()).backward()
    return {"x": x, "one": one, "other": other}


@case("paddle.grad inside the function", or_error=True)
def test_grad_inside(run: Run) -> Seen:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        inner = x.detach()
        inner.stop_gradient = False
        (slope,) = paddle.grad(inner.tanh().sum(), [inner])
        return x.exp() * slope

    return step(run, function, leaf(3, 4))


# ------------------------------------------------------------------ PyLayers, hooks, in-place ops


class cus_tanh(PyLayer):
    """The PyLayer of the article that this library answers."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        y = paddle.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: paddle.Tensor) -> paddle.Tensor:
        (y,) = ctx.saved_tensor()
        return dy * (1 - paddle.square(y))


class two_in_two_out(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, y: paddle.Tensor, power: int) -> Any:
        ctx.save_for_backward(x, y)
        ctx.power = power
        return x * y, y**power

    @staticmethod
    def backward(ctx: Any, d_product: paddle.Tensor, d_power: paddle.Tensor) -> Any:
        x, y = ctx.saved_tensor()
        return d_product * y, d_product * x + d_power * ctx.power * y ** (ctx.power - 1)


class WithNoise(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor) -> paddle.Tensor:
        ctx.noise = paddle.rand(x.shape)
        return x * ctx.noise

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> paddle.Tensor:
        return gradient * ctx.noise


class Masked(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        ctx.save_for_backward(x, mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> Any:
        x, mask = ctx.saved_tensor()
        of_mask = None if mask.stop_gradient else gradient * x
        return gradient * mask * (1 + x.stop_gradient), of_mask


class OneByOne(PyLayer):
    """Asks anew for each tensor that it has saved."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, y: paddle.Tensor) -> paddle.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> Any:
        return gradient * ctx.saved_tensor()[1], gradient * ctx.saved_tensor()[0]


def both_of_two(x: paddle.Tensor, y: paddle.Tensor) -> Any:
    product, power = two_in_two_out.apply(x.tanh(), y.exp(), 3)
    return product.exp(), power


PY_LAYERS: dict[str, tuple[Any, list[bool]]] = {
    "with two tensors in and out inside": (both_of_two, [False, False]),
    "whose apply is the function": (cus_tanh.apply, [False]),
    "that keeps a tensor on its context": (
        lambda x: WithNoise.apply(x.tanh()).exp(), [False],
    ),
    "that asks for each tensor by itself, before others ask": (
        lambda x, y: OneByOne.apply(x.exp(), y.exp()), [False, False],
    ),
    "that asks for each tensor by itself, after all others": (
        lambda x, y: OneByOne.apply(x, y).exp(), [False, False],
    ),
    "that asks what it saved whether it needs a gradient": (
        lambda x, mask: Masked.apply(x.tanh(), mask).exp(), [False, True],
    ),
}  # fmt: skip
"""Functions, and for each of their arguments whether it needs no gradient."""


@case("a PyLayer {which}", which=list(PY_LAYERS))
def test_py_layers(run: Run, which: str) -> Seen:
    function, stop_gradients = PY_LAYERS[which]
    return step(run, function, *[leaf(3, 4, stop_gradient=stop) for stop in stop_gradients])


class IntoMainGrad(PyLayer):
    """Adds the gradient of its weight into ``main_grad``, as fused gradient accumulation does."""

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> Any:
        x, weight = ctx.saved_tensor()
        of_weight = x.T @ gradient
        if not hasattr(weight, "main_grad"):
            return gradient @ weight.T, of_weight
        weight.main_grad.add_(of_weight)
        return gradient @ weight.T, None


class Fused(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.create_parameter([4, 4])

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return IntoMainGrad.apply(x.tanh(), self.weight).exp()


@case(
    "a PyLayer that adds into main_grad of its weight, {form}",
    form=["alone", "in a nested call"],
)
def test_main_grad(run: Run, form: str) -> Seen:
    block, x = Fused(), leaf(3, 4)
    main_grad = block.weight.main_grad = paddle.zeros([4, 4])
    inner = (lambda x: run(block, x).tanh()) if form == "in a nested call" else block
    for scale in (2, 3):
        run(inner, x * scale).sum().backward()
    return {"x": x, "block": block, "main_grad": main_grad}


class Looks(PyLayer):
    """Notes what it sees of the tensors that it has saved."""

    noted: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, weight: paddle.Tensor) -> paddle.Tensor:
        between = x * 2
        if HAS_ATTRIBUTES:
            between.tag = "between"
        ctx.save_for_backward(x, weight, between)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: paddle.Tensor) -> Any:
        x, weight, between = ctx.saved_tensor()
        has_old = weight.grad is not None
        Looks.noted.append((id(weight), type(weight), weight.name, has_old, weight.trainable))
        Looks.noted += [getattr(one, "tag", None) for one in (x, weight, between)]
        Looks.noted.append(ctx.saved_tensor()[1] is weight)
        return gradient * weight, gradient * x


HAS_ATTRIBUTES = hasattr(leaf(1), "__dict__")
"""Whether a user can put attributes on a tensor that is no parameter: from Paddle 3.0 on."""


@case(
    "what a PyLayer sees of what it saved: identity, name, .grad, attributes of a user; {where}",
    where=["the parameter of a Layer", "a captured parameter", "a parameter that is an argument"],
)
def test_what_a_py_layer_sees(run: Run, where: str) -> Seen:
    block, x = Fused(), leaf(4, 4)
    weight = block.weight
    weight.tag, weight.grad, weight.name = "weight", paddle.ones([4, 4]), "named by the user"
    up = x * 2
    if HAS_ATTRIBUTES:
        up.tag = "argument"
    Looks.noted.clear()
    if where == "the parameter of a Layer":
        block.forward = lambda x: Looks.apply(x, block.weight).exp()
        y = run(block, up)
    elif where == "a captured parameter":
        y = run(lambda x: Looks.apply(x, weight).exp(), up)
    else:
        y = run(lambda x, weight: Looks.apply(x, weight).exp(), up, weight)
    if HAS_ATTRIBUTES:
        up.tag = "changed since"
    y.sum().backward()
    noted = [one == (id(weight), *one[1:]) if type(one) is tuple else one for one in Looks.noted]
    kinds = [str(one[1:]) for one in Looks.noted if type(one) is tuple]
    noted = ["of the first forward" if one == "changed since" else one for one in noted]
    noted = ["of the first forward" if one == "argument" else one for one in noted]
    return {"x": x, "weight": weight, "noted": noted, "kinds": kinds}


def test_a_py_layer_that_asks_twice_runs_nothing_again() -> None:
    calls: list[int] = []

    def function(x: paddle.Tensor) -> paddle.Tensor:
        calls.append(1)
        return OneByOne.apply(x.exp(), x.tanh())

    recompute(function, leaf(3, 4)).sum().backward()
    assert len(calls) == 2


@case("a PyLayer inside: cus_tanh of the article")
def test_cus_tanh(run: Run) -> Seen:
    block = Using(paddle.nn.Linear(4, 4), lambda linear, x: linear(cus_tanh.apply(linear(x))))
    return step(run, block, leaf(3, 4))


def test_a_py_layer_differentiated_twice_is_refused() -> None:
    """What it saved would have no history; its first derivative is right."""
    x = leaf(3, 4)
    y = recompute(lambda h: cus_tanh.apply(h), x * 2)
    with pytest.raises(RecomputeError, match="PyLayer in a recomputed function"):
        paddle.grad(y.sum(), [x], create_graph=True)
    y = recompute(lambda h: cus_tanh.apply(h), x * 2)
    (found,) = paddle.grad(y.sum(), [x])
    (wanted,) = paddle.grad(cus_tanh.apply(x * 2).sum(), [x])
    assert found.equal_all(wanted)


Calls = list[tuple[str, list[float]]]


def noting(calls: Calls, name: str) -> Any:
    """A hook that notes the gradient in `calls`, and doubles it."""

    def hook(gradient: paddle.Tensor) -> paddle.Tensor:
        calls.append((name, gradient.numpy().ravel().tolist()))
        return gradient * 2

    return hook


@case("hooks on input, output and parameters")
def test_hooks_outside(run: Run) -> Seen:
    calls: Calls = []
    block, x = Block(), leaf(3, 4)
    z = x * 2
    z.register_hook(noting(calls, "input"))
    block.linear.weight.register_hook(noting(calls, "weight"))
    y = run(block, z)
    y.register_hook(noting(calls, "output"))
    y.square().sum().backward()
    return {"x": x, "block": block, "calls": sorted(calls)}


@case("hooks on tensors inside the function")
def test_hooks_inside(run: Run) -> Seen:
    calls: Calls = []
    block, x = Block(), leaf(3, 4)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        x.register_hook(noting(calls, "argument"))
        y = block(x)
        y.register_hook(noting(calls, "between"))
        return y.tanh()

    run(function, x * 2).sum().backward()
    return {"x": x, "block": block, "calls": sorted(calls)}


@case("hooks inside the function, on a tensor that it captures and on a parameter")
def test_hooks_on_what_is_outside(run: Run) -> Seen:
    """The second forward registers them again, on the same tensors."""
    block, x = Block(), leaf(3, 4)
    captured = x * 2

    def function(x: paddle.Tensor) -> paddle.Tensor:
        for tensor in (captured, block.linear.weight):
            tensor.register_hook(lambda gradient: gradient * 2)
        return block(x) * captured

    run(function, x * 3).sum().backward()
    block(x).sum().backward()  # the hook of the parameter stays, once
    return {"x": x, "block": block}


@case(
    "an inner call takes an argument of the outer one and the tensor that it captures, which is it"
)
def test_argument_that_is_captured(run: Run) -> Seen:
    x = leaf(3, 4)
    y = x * 2
    add = lambda a, b: a.exp() * b.tanh()  # noqa: E731
    run(lambda z: run(add, z, y).exp(), y).sum().backward()
    return {"x": x}


@case("a hook that counts gradients of a parameter that two blocks share")
def test_accumulation_hooks(run: Run) -> Seen:
    block, x, fired = Block(), leaf(3, 4), []
    on_gradient_added(block.linear.weight, lambda: fired.append(1))
    y = run(block, run(block, x * 2))
    y.sum().backward()
    return {"x": x, "block": block, "fired": sum(fired) > 0}


@case("retain_grads on a tensor inside the function")
def test_retain_grads_inside(run: Run) -> Seen:
    kept: list[paddle.Tensor] = []

    def function(x: paddle.Tensor) -> paddle.Tensor:
        y = x.tanh()
        y.retain_grads()
        kept.append(y)
        return y.exp()

    found = step(run, function, leaf(3, 4))
    return {**found, "kept": kept[0]}


@case("in-place operators inside the function")
def test_in_place_inside(run: Run) -> Seen:
    linear = paddle.nn.Linear(4, 4)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        y = linear(x)
        y.add_(x)
        y[:, 0] = 1.0
        y = F.relu_(y * 2)
        z = y * 3 + 1
        z.scale_(3.0)
        z.subtract_(x)
        return z.reshape_([-1])

    return {**step(run, function, leaf(3, 4)), "linear": linear}


@case("tensors filled piece by piece inside the function")
def test_setitem_inside(run: Run) -> Seen:
    def function(x: paddle.Tensor) -> paddle.Tensor:
        buffer = paddle.zeros([3, 4])
        buffer[0] = x[0].tanh()
        buffer[1:, ::2] = x[:2, :2].exp()
        return buffer * x

    return step(run, function, leaf(3, 4))


@case(
    "a saved tensor changed in place inside the function is refused, as in the plain call",
    has_gradients=False,
)
def test_saved_tensor_changed(run: Run) -> Seen:
    x = leaf(3, 4)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        y = x.exp()  # keeps its output
        z = y.tanh()
        y.add_(paddle.ones([4]))
        return z + y

    y = run(function, x * 2)
    try:
        y.sum().backward()
    except RuntimeError:
        return {"is refused": True}
    return {"is refused": False}


# ------------------------------------------------------------------------- steps and many calls


@case("gradient accumulation over three micro-batches")
def test_accumulation(run: Run) -> Seen:
    block = Block()
    for _ in range(3):
        run(block, leaf(3, 4) * 2).square().sum().backward()
    return {"block": block}


@case("three optimizer steps with AdamW and clipping")
def test_steps(run: Run) -> Seen:
    block = Block()
    optimizer = paddle.optimizer.AdamW(
        0.1, parameters=block.parameters(), grad_clip=paddle.nn.ClipGradByGlobalNorm(0.5)
    )
    for _ in range(3):
        run(block, leaf(3, 4) * 2).square().sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    run(block, leaf(3, 4) * 2).square().sum().backward()
    return {"block": block}


@case("two towers that share a block: four calls before one backward")
def test_two_towers(run: Run) -> Seen:
    block, query, passage = Block(), leaf(3, 4), leaf(5, 4)
    q, p = run(block, run(block, query * 2)), run(block, run(block, passage * 2))
    F.cross_entropy(q @ p.T, paddle.to_tensor([1, 0, 4])).backward()
    return {"query": query, "passage": passage, "block": block}


@case("a block called again with its own output, five times")
def test_weight_sharing(run: Run) -> Seen:
    block = Block()
    five = lambda x: functools.reduce(lambda y, _: run(block, y), range(5), x)  # noqa: E731
    return {**step(plain, five, leaf(3, 4)), "block": block}


@case("no_grad around the call: the function runs once", has_gradients=False)
def test_no_grad(run: Run) -> Seen:
    calls = []

    def function(x: paddle.Tensor) -> paddle.Tensor:
        calls.append(paddle.is_grad_enabled())
        return x.tanh()

    with paddle.no_grad():
        y = run(function, leaf(3, 4))
    return {"y": y, "calls": calls}


@case("no_grad inside the function")
def test_no_grad_inside(run: Run) -> Seen:
    block = Block()

    def function(x: paddle.Tensor) -> paddle.Tensor:
        with paddle.no_grad():
            scale = block(x).exp()
        return block(x) * scale

    return {**step(run, function, leaf(3, 4)), "block": block}


@case("enable_grad inside the function, no_grad around it")
def test_enable_grad_inside(run: Run) -> Seen:
    block, x = Block(), leaf(3, 4)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        with paddle.enable_grad():
            return block(x)

    with paddle.no_grad():
        y = run(function, x)
    y.sum().backward()
    return {"y": y, "x": x, "block": block}


@case("backward called under no_grad")
def test_backward_under_no_grad(run: Run) -> Seen:
    block, x = Block(), leaf(3, 4)
    y = run(block, x * 2).sum()
    with paddle.no_grad():
        y.backward()
        enabled = paddle.is_grad_enabled()
    return {"x": x, "block": block, "enabled inside": enabled}


# ------------------------------------------------------------------------------------ exceptions


class Fragile(paddle.nn.Layer):
    """Fails in one of its forwards, after it has changed everything that it can change."""

    def __init__(self, bad: int = 2) -> None:
        super().__init__()
        self.norm = paddle.nn.BatchNorm1D(4)
        self.calls, self.bad = 0, bad

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        y = F.dropout(self.norm(x), 0.5).tanh() * np.random.rand() * random.random()
        if self.calls == self.bad:
            raise KeyError("no such thing")
        return y


@case(
    "an exception in the {which} forward arrives as itself",
    which=["second", "first"],
    expected={"arrives as": "KeyError('no such thing')", "streams": "as in the plain call"},
)
def test_exception(run: Run, which: str) -> Seen:
    """Streams: of the first forward, which has drawn."""
    after = []
    for call in (plain, run):
        paddle.seed(6), np.random.seed(6), random.seed(6)
        block, x = Fragile(2 if which == "second" else 1), leaf(6, 4)
        arrived = "nothing"
        try:
            call(block, x * 2).sum().backward()
        except KeyError as error:
            arrived = repr(error)
        after.append(repr(state_of_the_process()))
    return {
        "arrives as": arrived,
        "streams": "changed" if which == "first" and len({*after}) > 1 else "as in the plain call",
    }


@case(
    "after an exception in the second forward, streams, flags and modes are restored",
    expected={"state": "as before the backward", "next step": "right"},
)
def test_state_after_an_exception(run: Run) -> Seen:
    def look(layer: paddle.nn.Layer) -> str:
        return repr((state_of_the_process(), layer.training, layer.norm._mean.tolist()))

    layer, x = Fragile(), leaf(6, 4)
    loss = run(layer, x * 2).sum()
    layer.eval()
    streams = paddle.get_rng_state(), np.random.get_state(), random.getstate()
    before = look(layer)
    paddle.set_rng_state(streams[0]), np.random.set_state(streams[1])
    random.setstate(streams[2])
    with contextlib.suppress(Exception):
        loss.backward()
    after = look(layer)
    steps = []
    for call in (plain, run):
        paddle.seed(5)
        block, x = Block(), leaf(3, 4)
        call(block, x * 2).sum().backward()
        steps.append(x.grad.numpy().tolist())
    return {
        "state": "as before the backward" if before == after else "changed",
        "next step": "right" if steps[0] == steps[1] else "wrong",
    }


@pytest.mark.parametrize("is_inner", [False, True])
def test_exception_names_the_layer(is_inner: bool) -> None:
    layer = recompute_wrapper(Fragile(), name="encoder.layers.3")
    block: Any = layer
    if is_inner:
        layer.calls = -1  # forward, repetition of the outer block, own repetition
        block = functools.partial(recompute, lambda x: layer(x).tanh())
    loss = block(leaf(6, 4)).sum()
    with pytest.raises(KeyError, match="no such thing") as caught:
        loss.backward()
    notes = [*getattr(caught.value, "__notes__", ()), str(caught.value.__cause__)]
    assert "second forward of Fragile 'encoder.layers.3'" in "\n".join(notes)


BACKWARDS: list[Callable[[paddle.Tensor, paddle.Tensor], Any]] = [
    lambda y, x: y.sum().backward(),
    lambda y, x: paddle.grad(y, [x]),
    lambda y, x: paddle.autograd.backward([y]),
]


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("backward", BACKWARDS)
def test_every_kind_of_exception(kind: type[BaseException], backward: Any) -> None:
    calls: list[int] = []

    def function(x: paddle.Tensor) -> paddle.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise kind("stop")
        return x.tanh()

    x = leaf(3)
    with pytest.raises(kind, match="stop"):
        backward(recompute(function, x), x)


def test_backward_inside_the_function_is_refused() -> None:
    x = leaf(3)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        y = x.tanh()
        y.sum().backward(retain_graph=True)
        return y

    with pytest.raises(RecomputeError, match=r"paddle.grad or backward inside it"):
        recompute(function, x)


def test_other_saved_tensors_hooks_around_are_refused() -> None:
    """Paddle allows one pair at a time."""
    x = leaf(3, 4)
    with (
        paddle.autograd.saved_tensors_hooks(lambda t: t.numpy(), paddle.to_tensor),
        pytest.raises(RecomputeError, match="other saved_tensors_hooks are in force"),
    ):
        recompute(Block(), x * 2)


def test_other_saved_tensors_hooks_around_the_backward_are_refused() -> None:
    x = leaf(3, 4)
    y = recompute(lambda x: x.tanh().exp(), x * 2)
    with (
        paddle.autograd.saved_tensors_hooks(lambda t: t.numpy(), paddle.to_tensor),
        pytest.raises(RecomputeError, match="other saved_tensors_hooks are in force"),
    ):
        y.sum().backward(retain_graph=True)
    x.clear_gradient()
    y.sum().backward()
    found = x.grad.tolist()
    x.clear_gradient()
    (x * 2).tanh().exp().sum().backward()
    assert found == x.grad.tolist()


def test_fleets_recompute_with_hooks_inside_names_patch_fleet() -> None:
    block, x = Block(), leaf(3, 4)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        return fleet_recompute(block, x, use_reentrant=False, preserve_rng_state=False)

    with pytest.raises(RecomputeError, match=r"patch_fleet\(\)"):
        recompute(function, x)
    recompute(block, x).sum().backward()  # the refusal leaves no hooks behind


def test_errors_of_paddles_own_stay_what_they_are() -> None:
    """After `recompute` has begun to watch the engine, too."""
    recompute(paddle.tanh, leaf(3)).sum().backward()
    y = leaf(3).tanh().sum()
    y.backward()
    with pytest.raises(SystemError, match="backward twice"):
        y.backward()
