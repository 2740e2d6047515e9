"""A tensor that was written to between forward and backward is refused, if the function uses it."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import recompute
from paddle_recompute.errors import RecomputeError
from tests.recompute.contract import Run, Seen, case, leaf, loss_of, plain

Tensor = paddle.Tensor
SHAPE = [4, 4]


def net() -> paddle.nn.Layer:
    return paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 4))


def updated(layer: paddle.nn.Layer, optimizer: str = "SGD") -> None:
    """A step of the optimizer on a loss of its own."""
    make = getattr(paddle.optimizer, optimizer)
    step = make(0.1, parameters=layer.parameters())
    layer(paddle.ones([3, 4])).square().sum().backward()
    step.step()
    step.clear_grad()


@paddle.no_grad()
def in_place(tensor: Tensor) -> None:
    tensor.add_(paddle.ones(tensor.shape))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "set_value": lambda t: t.set_value(t + 1),
    "set_value of an array": lambda t: t.set_value(np.ones(t.shape, "float32")),
    "paddle.assign": lambda t: paddle.assign(t + 1, t),
    "paddle.assign of an array": lambda t: paddle.assign(np.ones(t.shape, "float32"), t),
    "copy_": lambda t: t.copy_(t + 1, True),
    "add_": in_place,
}
"""Each makes other values of a tensor, in place."""


@paddle.no_grad()
def written(how: str, tensor: Tensor) -> None:
    WRITES[how](tensor)


def optimizers() -> list[str]:
    kinds = vars(paddle.optimizer).items()
    return sorted(
        name
        for name, kind in kinds
        if inspect.isclass(kind)
        and issubclass(kind, paddle.optimizer.Optimizer)
        and name not in ("Optimizer", "LBFGS")  # LBFGS wants a function
    )


@case(
    "an optimizer step ({optimizer}) between forward and backward",
    optimizer=["AdamW", *(name for name in optimizers() if name != "AdamW")],
    or_error=True,
    num_listed=1,
)
def test_optimizer(run: Run, optimizer: str) -> Seen:
    layer, x = net(), leaf(3, 4)
    y = run(layer, x * 2)
    updated(layer, optimizer)
    loss_of(y).backward()
    return {"x": x, "layer": layer}


@case("a GAN's order: a step of D between G's forward through D and its backward", or_error=True)
def test_gan(run: Run) -> Seen:
    g, d, z = net(), net(), leaf(3, 4)
    step = paddle.optimizer.Adam(0.1, parameters=d.parameters())
    fake = run(g, z * 2)
    loss_g = run(d, fake).mean()
    d_loss = run(d, fake.detach()).square().mean() + run(d, leaf(3, 4)).mean()
    d_loss.backward()
    step.step()
    step.clear_grad()
    loss_g.backward()
    return {"z": z, "g": g, "d": d}


def load(layer: paddle.nn.Layer) -> None:
    layer.set_state_dict(net().state_dict())


def change_of(how: str) -> Callable[[paddle.nn.Layer], None]:
    return lambda layer: written(how, layer[0].bias)


CHANGES: dict[str, Callable[[paddle.nn.Layer], None]] = {
    "set_state_dict": load,
    **{f"a parameter changed by {how}": change_of(how) for how in WRITES},
}


@case("{what} between forward and backward", what=list(CHANGES), or_error=True)
def test_parameter(run: Run, what: str) -> Seen:
    layer, x = net(), leaf(3, 4)
    y = run(layer, x * 2)
    CHANGES[what](layer)
    loss_of(y).backward()
    return {"x": x, "layer": layer}


def after_the_change(y: Tensor, found: Seen) -> Seen:
    """The backward; plain Paddle refuses some, of an operator that has saved the tensor."""
    try:
        loss_of(y).backward()
    except RuntimeError as error:
        if isinstance(error, RecomputeError):
            raise
        return {"is refused": True}
    return found


class Scaled(paddle.nn.Layer):
    """Reads a tensor that is in a list."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.scales = [scale]

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scales[0]).tanh()


HELD: dict[str, tuple[bool, Callable[[Tensor], Any]]] = {
    "a parameter in a closure": (True, lambda w: lambda x: (x @ w).tanh()),
    "an argument": (False, lambda scale: lambda x, scale: ((x + 1) * scale).tanh()),
    "a captured tensor": (False, lambda scale: lambda x: ((x + 1) * scale).tanh()),
    "a parameter among the arguments": (True, lambda w: lambda x, w: (x @ w).tanh()),
    "a tensor that a Layer has as an attribute": (False, Scaled),
    "a parameter in a default": (True, lambda w: lambda x, w=w: (x @ w).tanh()),
    "a parameter in a list": (True, lambda w: (lambda ws: lambda x: (x @ ws[0]).tanh())([w])),
    "a parameter in an object": (
        True, lambda w: (lambda s: lambda x: (x @ s.w).tanh())(types.SimpleNamespace(w=w)),
    ),
}  # fmt: skip
"""What holds a tensor: whether that is a parameter, and the function that reads it."""


def held_tensor(run: Run, what: str, how: str) -> Seen:
    is_parameter, make = HELD[what]
    x, held = leaf(3, 4), leaf(3, 4, stop_gradient=how not in RELEASES)
    if is_parameter:
        held = paddle.create_parameter(SHAPE, "float32")
    arguments = [held] if "argument" in what else []
    y = run(make(held), x * 2, *arguments)
    if how in RELEASES:
        getattr(held, how)()
        return after_the_change(y, {"x": x})
    written(how, held)
    return after_the_change(y, {"x": x, "held": held})


RELEASES = ["_clear_dataptr", "_clear_data"]


def held_case(what: list[str], how: list[str], num_listed: int) -> Any:
    """`what` goes round first."""
    settings = {"how": how, "what": what, "num_listed": num_listed}
    return case("{what} changed by {how}", or_error=True, has_gradients=False, **settings)


FIRST, *OTHERS = WRITES
test_held = held_case(list(HELD), [FIRST], 5)(held_tensor)
test_argument = held_case(["an argument", "a captured tensor"], OTHERS, 4)(held_tensor)


@case("the weights of an LSTM changed between forward and backward", or_error=True)
def test_lstm(run: Run) -> Seen:
    layer, x = paddle.nn.LSTM(4, 3), leaf(2, 3, 4)
    y = run(lambda x: layer(x)[0], x * 2)
    for parameter in layer.parameters():
        written("set_value", parameter)
    loss_of(y).backward()
    return {"x": x, "layer": layer}


@case("an output of a block changed by set_value before the next block", or_error=True)
def test_between_two_blocks(run: Run) -> Seen:
    first, second, x = net(), net(), leaf(3, 4)
    h = run(first, x * 2)
    written("set_value", h)
    loss_of(run(second, h)).backward()
    return {"x": x, "layers": [first, second]}


class ActNorm(paddle.nn.Layer):
    """Sets its parameters from its first batch."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.scale = self.create_parameter([4])
        self.is_set, self.how = False, how

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.is_set = True
            with paddle.no_grad():
                scale = 1 / (1 + x.std(0))
                if self.how == "set_value":
                    self.scale.set_value(scale)
                else:
                    self.scale.scale_(0.0).add_(scale)
        return (x * self.scale).tanh()


@case(
    "ActNorm: the first forward sets the parameters of the block, by {how}",
    how=["set_value", "add_"],
    or_error=True,
)
def test_act_norm(run: Run, how: str) -> Seen:
    block, x = ActNorm(how), leaf(3, 4)
    loss_of(run(block, x * 2)).backward()
    return {"x": x, "block": block}


@case("ActNorm after one pass under no_grad")
def test_act_norm_set_before(run: Run) -> Seen:
    block, x = ActNorm("set_value"), leaf(3, 4)
    with paddle.no_grad():
        run(block, x * 2)
    loss_of(run(block, x * 2)).backward()
    return {"x": x, "block": block}


@pytest.mark.parametrize("how", ["set_value", "add_"])
def test_the_error_says_that_the_forward_makes_the_change(how: str) -> None:
    block = ActNorm(how)
    loss = loss_of(recompute(block, leaf(3, 4)))
    block.scale.set_value(paddle.ones([4]))  # whoever else has changed it
    name = re.escape(block.scale.name)
    with pytest.raises(RecomputeError, match=rf"forward itself changes the parameter '{name}'.*no"):
        loss.backward()


test_released = case(
    "{what}, whose memory is released ({how}) between forward and backward",
    how=RELEASES,
    what=list(HELD),
    or_error=True,
    has_gradients=False,
    num_listed=8,
)(held_tensor)


@pytest.mark.parametrize("how", RELEASES)
@pytest.mark.parametrize("kind", ["leaf", "result", "parameter of a Layer"])
def test_the_released_tensor_is_named(kind: str, how: str) -> None:
    layer, captured = paddle.nn.Linear(4, 4), leaf(4, 4) if kind == "leaf" else leaf(4, 4) * 2
    loss = loss_of(recompute(lambda x: layer(x @ captured).tanh(), leaf(3, 4)))
    name = re.escape(layer.weight.name) if "Layer" in kind else "captured"
    getattr(layer.weight if "Layer" in kind else captured, how)()
    with pytest.raises(RecomputeError, match=rf"'{name}'.*has no memory any more"):
        loss.backward()


@case("a parameter and a captured tensor, released before the forward, that nobody reads")
def test_released_before(run: Run) -> Seen:
    layer, unread, x = net(), [leaf(4)], leaf(3, 4)
    layer[2].weight._clear_dataptr()
    unread[0]._clear_dataptr()
    loss_of(run(lambda x: layer[0](x) if unread else x, x * 2)).backward()
    return {"x": x, "layer": layer[0]}


# --------------------------------------------------------------- what is no reason to refuse


@case(
    "an optimizer step on another network of {owner}", owner=["an object", "a Layer", "a closure"]
)
def test_step_on_another_network(run: Run, owner: str) -> Seen:
    class Both(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.g, self.d = net(), net()

        def generate(self, z: Tensor) -> Tensor:
            return self.g(z)

    both, z = Both(), leaf(3, 4)
    holder = types.SimpleNamespace(both=both, g=both.g, d=both.d)
    functions: dict[str, Any] = {
        "an object": lambda z: holder.g(z),
        "a Layer": both.generate,
        "a closure": lambda z: both.generate(z),
    }
    fake = run(functions[owner], z * 2)
    updated(both.d, "Adam")
    loss_of(fake).backward()
    return {"z": z, "both": both}


@case("gradients cleared and added to between forward and backward")
def test_gradients(run: Run) -> Seen:
    layer, x = net(), leaf(3, 4)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    loss_of(run(layer, x * 2)).backward()
    y = run(layer, x * 3)
    optimizer.clear_grad()
    loss_of(run(layer, x * 4)).backward()
    loss_of(y).backward()
    return {"x": x, "layer": layer}


@case("steps with accumulation")
def test_accumulation(run: Run) -> Seen:
    layer, x = net(), leaf(3, 4)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    for _ in range(2):
        for _ in range(2):
            loss_of(run(layer, x * 2)).backward()
        optimizer.step()
        optimizer.clear_grad()
    return {"x": x, "layer": layer}


@case("a captured tensor that the function itself adds to")
def test_metric(run: Run) -> Seen:
    layer, x, total = net(), leaf(3, 4), paddle.zeros([])

    def block(x: Tensor) -> Tensor:
        y = layer(x)
        total.add_(y.detach().sum() * 0)
        return y

    loss_of(run(block, x * 2)).backward()
    return {"x": x, "layer": layer}


class Holds(paddle.nn.Layer):
    """Reads a tensor that is not its own: in an attribute or a list, or in code."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held
        self.scale = paddle.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        held = self.held[0] if isinstance(self.held, list) else self.held
        return self.scale(x) * (SHARED[0] if held is None else held)


SHARED = [paddle.ones([4])]


@pytest.mark.parametrize("called", [0, 1, 2])
@pytest.mark.parametrize("where", ["attribute", "list", "code", "hook"])
def test_one_of_the_layers_that_share_a_tensor_is_called(where: str, called: int) -> None:
    shared = SHARED[0] = paddle.ones([4])
    held = {"attribute": shared, "list": [shared]}.get(where)
    layers = [paddle.nn.Tanh() if where == "hook" else Holds(held) for _ in range(3)]
    for layer in layers if where == "hook" else ():
        layer.register_forward_post_hook(lambda _layer, _inputs, output: output * shared)
    blocks = paddle.nn.LayerList(layers)
    output = recompute(lambda x: blocks[called](x), leaf(3, 4))
    in_place(shared)
    with pytest.raises(RecomputeError, match="was changed in place"):
        output.sum().backward()


def test_plain_backwards_see_nothing_of_it() -> None:
    """Paddle lets weights change before a backward; who does not recompute is not refused."""
    layer = net()
    recompute(layer, leaf(3, 4)).sum().backward()  # from now on, writes are counted
    y = plain(layer, leaf(3, 4))
    versions = [parameter.inplace_version for parameter in layer.parameters()]
    updated(layer)
    layer.set_state_dict(net().state_dict())
    assert [parameter.inplace_version for parameter in layer.parameters()] == versions
    y.sum().backward()


# ------------------------------------------------------------------------------------- messages


def test_the_parameter_is_named() -> None:
    layer = net()
    y = recompute(layer, leaf(3, 4))
    updated(layer)
    name = layer[0].weight.name
    with pytest.raises(RecomputeError, match=rf"parameter '{name}' \(\[4, 4\]\) was changed"):
        y.sum().backward()
    assert layer[0].weight.name == name  # can be asked for again


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: paddle.nn.utils.vector_to_parameters(paddle.ones([20]), layer.parameters()),
        lambda layer: setattr(layer.weight, "data", paddle.ones([4, 4])),
        lambda layer: paddle.nn.initializer.Constant(2.0)(layer.weight),
        lambda layer: layer.weight.set_value(value=paddle.ones([4, 4])),
        lambda layer: paddle.nn.initializer.Constant(2.0)(param=layer.weight),
        lambda layer: layer.weight[2:].set_value(paddle.ones([2, 4])),
    ],
    ids=["vector_to_parameters", "data", "Constant", "named value", "named parameter", "a view"],
)
def test_writes_past_the_tensor_itself(change: Callable[[paddle.nn.Layer], None]) -> None:
    layer, x = paddle.nn.Linear(4, 4), leaf(3, 4)
    y = recompute(lambda t: layer(t).tanh(), x).square().sum()
    before = layer.weight.numpy()
    change(layer)
    assert not np.array_equal(before, layer.weight.numpy())
    with pytest.raises(RecomputeError, match="was changed between the forward and the backward"):
        y.backward()


def test_writes_that_are_not_detected() -> None:
    """The docstring lists them: the second forward uses the new values."""
    layer, x = paddle.nn.Linear(4, 4), leaf(3, 4)
    y = recompute(lambda t: layer(t).tanh(), x).square().sum()
    with paddle.no_grad():
        layer.weight.exponential_()
    y.backward()
    assert "exponential_" in (recompute.__doc__ or "").partition("*Not detected*")[2]
