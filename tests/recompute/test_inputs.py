"""What may be passed to a recomputed function."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import keep, recompute
from paddle_recompute.errors import ConfigError, RecomputeError
from tests.fake_device import selected
from tests.recompute.contract import Run, Seen, assert_as_plain, case, leaf, step


class Mix(paddle.nn.Layer):
    """A block with parameters that takes whatever `forward` is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.linear, *args, **kwargs)


def given(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def fixed(*shape: int) -> paddle.Tensor:
    """A tensor without gradient."""
    return leaf(*shape, stop_gradient=True)


def with_keywords(
    linear: Any, x: paddle.Tensor, scale: Any = None, power: int = 1
) -> paddle.Tensor:
    return linear(x * scale) ** power


def of_two(linear: Any, tensors: Any) -> paddle.Tensor:
    return linear(tensors[0] * tensors[1]).tanh()


def of_nested(linear: Any, x: paddle.Tensor, rest: Any) -> paddle.Tensor:
    (a, [b, none]), scale = rest["pair"], rest["scale"]
    assert none is None
    return linear(x * a) * b * scale


def of_python_values(linear: Any, x: paddle.Tensor, *rest: Any) -> paddle.Tensor:
    none, factor, activation, shift, flag = rest
    assert none is None and flag is True
    return getattr(F, activation)(linear(x)) * factor + paddle.to_tensor(shift)


Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Batch:
    x: paddle.Tensor
    mask: paddle.Tensor | None
    scale: float = 2.0


OF_A_LAYER: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "several positional tensors, one without gradient": (
        lambda linear, x, y, z: linear(x * y) + z,
        lambda: given(leaf(3, 4), fixed(3, 4), leaf(4)),
    ),
    "keyword arguments of a forward(*args, **kwargs)": (
        with_keywords, lambda: given(leaf(3, 4), power=2, scale=leaf(3, 4)),
    ),
    "a list of tensors": (of_two, lambda: given([leaf(3, 4), leaf(3, 4)])),
    "a tuple of tensors": (of_two, lambda: given((leaf(3, 4), leaf(3, 4)))),
    "a tuple of tensors with and without gradient": (
        of_two, lambda: given((leaf(3, 4), fixed(3, 4))),
    ),
    "a tuple of a tensor and None": (
        lambda linear, cache, x: linear(x) * cache[0] if cache[1] is None else x,
        lambda: given((leaf(3, 4), None), leaf(3, 4)),
    ),
    "a dict of tensors": (
        lambda linear, batch: linear(batch["x"]) * batch["y"],
        lambda: given({"y": leaf(3, 4), "x": leaf(3, 4)}),
    ),
    "nested lists, tuples and dicts": (
        of_nested,
        lambda: given(leaf(3, 4), {"pair": (leaf(3, 4), [leaf(3, 4), None]), "scale": 0.5}),
    ),
    "a named tuple": (
        lambda linear, pair: linear(pair.left) * pair.right.tanh(),
        lambda: given(Pair(leaf(3, 4), leaf(3, 4))),
    ),
    "a dataclass": (
        lambda linear, batch: linear(batch.x).tanh() * batch.scale,
        lambda: given(Batch(leaf(3, 4), None)),
    ),
    "None, numbers, strings, and a NumPy array": (
        of_python_values,
        lambda: given(leaf(3, 4), None, 0.5, "gelu", np.float32([1, 2, 3, 4]), True),
    ),
    "an integer tensor beside one with gradient": (
        lambda linear, x, index: paddle.gather(linear(x).tanh(), index),
        lambda: given(leaf(3, 4), paddle.to_tensor([2, 0, 2])),
    ),
    "a boolean mask": (
        lambda linear, x, mask: paddle.where(mask, linear(x), x).tanh(),
        lambda: given(leaf(3, 4), paddle.to_tensor([[True], [False], [True]])),
    ),
    "no input needs a gradient: a batch of floats": (
        lambda linear, x: linear(x).tanh(), lambda: given(fixed(3, 4)),
    ),
    "no argument at all": (
        lambda linear: (linear.weight @ linear.weight).tanh() + linear.bias, lambda: given(),
    ),
    "the same tensor twice": (
        lambda linear, a, b: linear(a) * b.exp(), lambda: (lambda x: given(x, x))(leaf(3, 4)),
    ),
    "the same tensor by position, by keyword and in a list": (
        lambda linear, a, b, c=None: linear(a) * b[0].exp() * c if a is c else a,
        lambda: (lambda x: given(x, [x], c=x))(leaf(3, 4)),
    ),
}  # fmt: skip


@case("{what}", what=list(OF_A_LAYER))
def test_arguments_of_a_layer(run: Run, what: str) -> Seen:
    forward, make = OF_A_LAYER[what]
    args, kwargs = make()
    return step(run, Mix(forward), *args, **kwargs)


def scaled(x: paddle.Tensor, scale: Any = None, power: int = 1) -> paddle.Tensor:
    return (x * scale).tanh() ** power


def variadic(*tensors: paddle.Tensor, **named: paddle.Tensor) -> paddle.Tensor:
    return sum(t.tanh() for t in tensors) + named["b"].exp() - named["a"].exp()


def product(x: paddle.Tensor, y: paddle.Tensor) -> paddle.Tensor:
    return x * y * x


OF_A_FUNCTION: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "keyword arguments": (scaled, lambda: given(leaf(3, 4), power=2, scale=leaf(3, 4))),
    "*args and **kwargs": (variadic, lambda: given(leaf(3), leaf(3), a=leaf(3), b=leaf(3))),
    "tensors of type float64": (
        product, lambda: given(leaf(3, 4, dtype="float64"), leaf(4, dtype="float64")),
    ),
    "tensors of type bfloat16": (
        product, lambda: given(leaf(3, 4, dtype="bfloat16"), leaf(4, dtype="bfloat16")),
    ),
    "tensors with no dimension": (lambda x, y: (x * y).exp(), lambda: given(leaf(3), leaf())),
}  # fmt: skip


@case("{what}", what=list(OF_A_FUNCTION))
def test_arguments_of_a_function(run: Run, what: str) -> Seen:
    function, make = OF_A_FUNCTION[what]
    args, kwargs = make()
    return step(run, function, *args, **kwargs)


class Scale(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)

    def forward(self, x: paddle.Tensor, scale: paddle.Tensor) -> paddle.Tensor:
        return self.linear(x).exp() * scale


class KeywordOnly(Scale):
    def forward(self, x: paddle.Tensor, *, scale: paddle.Tensor) -> paddle.Tensor:
        return self.linear(x) * scale


@case("all arguments by keyword, in another order")
def test_only_keywords(run: Run) -> Seen:
    return step(run, Scale(), scale=leaf(3, 4), x=leaf(3, 4))


@case("a keyword-only argument")
def test_keyword_only(run: Run) -> Seen:
    return step(run, KeywordOnly(), leaf(3, 4), scale=leaf(3, 4))


@case("a default argument that is a tensor")
def test_default(run: Run) -> Seen:
    scale = leaf(3, 4)

    def block(x: paddle.Tensor, scale: paddle.Tensor = scale, power: int = 2) -> paddle.Tensor:
        return (x * scale).tanh() ** power

    return {**step(run, block, leaf(3, 4)), "scale": scale}


@case("a tensor inside an object of the user's own")
def test_opaque_object(run: Run) -> Seen:
    x = leaf(3, 4)
    block = Mix(lambda linear, holder: linear(holder.x).tanh())
    holder = types.SimpleNamespace(x=x * 2)
    return {**step(run, block, holder), "args": (), "x": x, "layer": block}


TOKENS = [[0, 3], [3, 1]]


def chain(*frozen: str) -> paddle.nn.Layer:
    """Two Linear Layers, of which the parameters whose names begin with `frozen` do not train."""
    layers = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 4))
    for name, parameter in layers.named_parameters():
        parameter.stop_gradient = name.startswith(frozen)
    return layers


LAYERS: dict[str, tuple[Callable[[], paddle.nn.Layer], Callable[[], paddle.Tensor]]] = {
    "one positional tensor": (
        lambda: paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.GELU()),
        lambda: leaf(3, 4),
    ),
    "no input needs a gradient: token ids into an embedding": (
        lambda: paddle.nn.Sequential(paddle.nn.Embedding(5, 4), paddle.nn.Linear(4, 4)),
        lambda: paddle.to_tensor(TOKENS),
    ),
    "an embedding with sparse gradients": (
        lambda: paddle.nn.Sequential(paddle.nn.Embedding(5, 4, sparse=True), paddle.nn.Tanh()),
        lambda: paddle.to_tensor(TOKENS),
    ),
    "some frozen parameters": (lambda: chain("0.weight"), lambda: leaf(3, 4)),
    "all parameters frozen": (lambda: chain(""), lambda: leaf(3, 4)),
}


@case("{what}", what=list(LAYERS))
def test_layers(run: Run, what: str) -> Seen:
    make, make_input = LAYERS[what]
    return step(run, make(), make_input())


@case("nothing needs a gradient", has_gradients=False)
def test_nothing_needs_a_gradient(run: Run) -> Seen:
    return step(run, chain(""), fixed(3, 4))


@case("a parameter as argument")
def test_parameter(run: Run) -> Seen:
    owner = paddle.nn.Linear(4, 4)
    block = Mix(lambda linear, x, weight: linear(x).tanh() @ weight)
    return {**step(run, block, leaf(3, 4), owner.weight), "owner": owner}


@case("a parameter as argument, used twice: tied weights")
def test_tied_weights(run: Run) -> Seen:
    embedding = paddle.nn.Embedding(5, 4)
    x = embedding(paddle.to_tensor(TOKENS))
    y = run(lambda x, weight: (x.tanh() @ weight.T).exp(), x, embedding.weight)
    y.sum().backward()
    return {"y": y, "embedding": embedding}


@case("a view of another tensor")
def test_view(run: Run) -> Seen:
    x = leaf(4, 4)
    y = run(lambda a, b: (a * b).exp(), (x * 2).transpose([1, 0]), (x * 3)[:, 1:2])
    y.sum().backward()
    return {"y": y, "x": x}


FUNCTIONS = ["function", "lambda", "method", "bound forward", "partial", "callable object"]


@case("an argument of size 0, as of an expert without tokens, and a kept result of size 0")
def test_size_0(run: Run) -> Seen:
    if selected.is_selected():
        pytest.skip("a plain tanh of size 0 ends the process on the simulated device")
    x = leaf(3, 4)
    up = x * 2

    def block(x: paddle.Tensor) -> paddle.Tensor:
        return keep(paddle.tanh, x).exp().tanh()

    y = paddle.concat([run(block, up[:0].tanh()), run(block, up)])
    y.square().sum().backward()
    return {"x": x, "y": y}


@case("a {kind} instead of a Layer", kind=FUNCTIONS)
def test_kinds_of_functions(run: Run, kind: str) -> Seen:
    layer = paddle.nn.Linear(4, 4)

    def function(x: paddle.Tensor, power: int = 1) -> paddle.Tensor:
        return layer(x).tanh() ** power

    class Block:
        def method(self, x: paddle.Tensor) -> paddle.Tensor:
            return function(x)

        def __call__(self, x: paddle.Tensor) -> paddle.Tensor:
            return function(x)

    given = {
        "function": function,
        "lambda": lambda x: layer(x).tanh(),
        "method": Block().method,
        "bound forward": layer.forward,
        "partial": functools.partial(function, power=2),
        "callable object": Block(),
    }[kind]
    return {**step(run, given, leaf(3, 4)), "layer": layer}


@case("a Layer as argument")
def test_layer_as_argument(run: Run) -> Seen:
    layer = paddle.nn.Linear(4, 4)
    return {**step(run, lambda block, x: block(x).tanh(), layer, leaf(3, 4)), "layer": layer}


@case("a list that the caller changes before the backward")
def test_list_changed_by_the_caller(run: Run) -> Seen:
    x, y = leaf(3, 4), leaf(3, 4)
    items = [x * 2, y * 2]
    out = run(lambda items: (items[0].exp() * items[1]).tanh(), items)
    items.reverse()
    items.append(None)
    out.sum().backward()
    return {"out": out, "x": x, "y": y}


@case("a list that the function itself empties")
def test_list_changed_by_the_function(run: Run) -> Seen:
    x, y = leaf(3, 4), leaf(3, 4)
    items = [x * 2, y * 2]
    out = run(lambda items: (items.pop() * items.pop()).tanh(), items)
    out.sum().backward()
    return {"out": out, "x": x, "y": y}


@case("a dict to which the function adds")
def test_dict_changed_by_the_function(run: Run) -> Seen:
    def block(x: paddle.Tensor, cache: dict[str, Any]) -> paddle.Tensor:
        cache["calls"] = cache.get("calls", 0) + 1
        return (x * cache["calls"]).tanh()

    x = leaf(3, 4)
    out = run(block, x * 2, {})
    out.sum().backward()
    return {"out": out, "x": x}


# ------------------------------------------------------------------- what is refused, and options


@case("an argument changed in place by the function", or_error=True)
def test_argument_changed_by_the_function(run: Run) -> Seen:
    x = leaf(3, 4)
    out = run(lambda x: x.add_(paddle.ones([4])).tanh(), x * 2)
    out.sum().backward()
    return {"out": out, "x": x}


@case("an argument changed in place between forward and backward", or_error=True)
def test_argument_changed_before_the_backward(run: Run) -> Seen:
    x = leaf(3, 4)
    y = x * 2
    out = run(lambda y: (y + 1).tanh(), y)
    y.add_(paddle.ones([4]))
    out.sum().backward()
    return {"out": out, "x": x}


@case("a parameter changed in place between forward and backward", has_gradients=False)
def test_parameter_changed_before_the_backward(run: Run) -> Seen:
    """Plain Paddle refuses the backward: the operators saved the parameter."""
    layer = paddle.nn.Linear(4, 4)
    out = run(lambda x: layer(x).tanh() @ layer.weight, leaf(3, 4) * 2)
    with paddle.no_grad():
        layer.weight.add_(paddle.ones([4, 4]))
    try:
        out.sum().backward()
    except RuntimeError:
        return {"is refused": True}
    return {"is refused": False}


def test_change_in_place_by_the_function_is_refused_by_name() -> None:
    def block(x: paddle.Tensor, state: dict[str, paddle.Tensor]) -> paddle.Tensor:
        state["seen"].add_(paddle.ones([4]))
        return x * state["seen"]

    with pytest.raises(RecomputeError, match=r"block.*positional argument \[1\]\['seen'\]"):
        recompute(block, leaf(4), {"seen": paddle.zeros([4])})
    with pytest.raises(RecomputeError, match=r"block.*keyword argument \['state'\]\['seen'\]"):
        recompute(block, leaf(4), state={"seen": paddle.zeros([4])})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "cloud"}, r"offload='cloud' does not exist; it is one of 'host', 'disk'"),
        ({"determinism_check": "strict"}, r"'strict' does not exist; it is one of 'default'"),
    ],
)
def test_options_that_do_not_exist(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recompute(paddle.tanh, leaf(3), **options)


@pytest.mark.parametrize(
    "options",
    [{"use_reentrant": True, "preserve_rng_state": False}, {"offload_indices": [0]}],
    ids=str,
)
def test_keywords_of_paddles_own_recompute(options: dict[str, Any]) -> None:
    def outcome(run: Run) -> Seen:
        return step(run, paddle.nn.Linear(4, 4), leaf(3, 4))

    assert_as_plain(outcome, functools.partial(recompute, **options))
