"""What may be passed to a recomputed function."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import recompute
from paddle_recompute.errors import ConfigError, RecomputeError
from tests.recompute.contract import Run, Seen, case, leaf, loss_of, step, upstream


class Mix(paddle.nn.Layer):
    """A block with parameters that takes whatever `forward` is given."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self.linear, *args, **kwargs)


@case("one positional tensor")
def test_positional(run: Run) -> Seen:
    return step(run, paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.GELU()), leaf(3, 4))


@case("several positional tensors, one without gradient")
def test_several(run: Run) -> Seen:
    block = Mix(lambda linear, x, y, z: linear(x * y) + z)
    return step(run, block, leaf(3, 4), leaf(3, 4, stop_gradient=True), leaf(4))


@case("keyword arguments")
def test_keywords_by_name(run: Run) -> Seen:
    def block(x: paddle.Tensor, scale: Any = None, power: int = 1) -> paddle.Tensor:
        return (x * scale).tanh() ** power

    return step(run, block, leaf(3, 4), power=2, scale=leaf(3, 4))


@case("keyword arguments of a forward(*args, **kwargs)")
def test_keywords(run: Run) -> Seen:
    def forward(linear: Any, x: paddle.Tensor, scale: Any = None, power: int = 1) -> paddle.Tensor:
        return linear(x * scale) ** power

    return step(run, Mix(forward), leaf(3, 4), power=2, scale=leaf(3, 4))


@case("all arguments by keyword, in another order")
def test_only_keywords(run: Run) -> Seen:
    class Scale(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = paddle.nn.Linear(4, 4)

        def forward(self, x: paddle.Tensor, scale: paddle.Tensor) -> paddle.Tensor:
            return self.linear(x).exp() * scale

    return step(run, Scale(), scale=leaf(3, 4), x=leaf(3, 4))


@case("a keyword-only argument")
def test_keyword_only(run: Run) -> Seen:
    class Scale(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = paddle.nn.Linear(4, 4)

        def forward(self, x: paddle.Tensor, *, scale: paddle.Tensor) -> paddle.Tensor:
            return self.linear(x) * scale

    return step(run, Scale(), leaf(3, 4), scale=leaf(3, 4))


@case("a default argument that is a tensor")
def test_default(run: Run) -> Seen:
    scale = leaf(3, 4)

    def block(x: paddle.Tensor, scale: paddle.Tensor = scale, power: int = 2) -> paddle.Tensor:
        return (x * scale).tanh() ** power

    return {**step(run, block, leaf(3, 4)), "scale": scale}


@case("*args and **kwargs")
def test_variadic(run: Run) -> Seen:
    def block(*tensors: paddle.Tensor, **named: paddle.Tensor) -> paddle.Tensor:
        return sum(t.tanh() for t in tensors) + named["b"].exp() - named["a"].exp()

    return step(run, block, leaf(3), leaf(3), a=leaf(3), b=leaf(3))


@case("a list of tensors")
def test_list(run: Run) -> Seen:
    block = Mix(lambda linear, tensors: linear(tensors[0] * tensors[1]).tanh())
    return step(run, block, [leaf(3, 4), leaf(3, 4)])


@case("a tuple of tensors")
def test_tuple(run: Run) -> Seen:
    block = Mix(lambda linear, tensors: linear(tensors[0] * tensors[1]).tanh())
    return step(run, block, (leaf(3, 4), leaf(3, 4)))


@case("a tuple of tensors with and without gradient")
def test_mixed_tuple(run: Run) -> Seen:
    block = Mix(lambda linear, tensors: linear(tensors[0] * tensors[1]).tanh())
    return step(run, block, (leaf(3, 4), leaf(3, 4, stop_gradient=True)))


@case("a tuple of a tensor and None")
def test_tuple_with_none(run: Run) -> Seen:
    block = Mix(lambda linear, cache, x: linear(x) * cache[0] if cache[1] is None else x)
    return step(run, block, (leaf(3, 4), None), leaf(3, 4))


@case("a dict of tensors")
def test_dict(run: Run) -> Seen:
    block = Mix(lambda linear, batch: linear(batch["x"]) * batch["y"])
    return step(run, block, {"y": leaf(3, 4), "x": leaf(3, 4)})


@case("nested lists, tuples and dicts")
def test_nested(run: Run) -> Seen:
    def forward(linear: Any, x: paddle.Tensor, rest: Any) -> paddle.Tensor:
        (a, [b, none]), scale = rest["pair"], rest["scale"]
        assert none is None
        return linear(x * a) * b * scale

    block = Mix(forward)
    rest = {"pair": (leaf(3, 4), [leaf(3, 4), None]), "scale": 0.5}
    return step(run, block, leaf(3, 4), rest)


Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Batch:
    x: paddle.Tensor
    mask: paddle.Tensor | None
    scale: float = 2.0


@case("a named tuple")
def test_named_tuple(run: Run) -> Seen:
    block = Mix(lambda linear, pair: linear(pair.left) * pair.right.tanh())
    return step(run, block, Pair(leaf(3, 4), leaf(3, 4)))


@case("a dataclass")
def test_dataclass(run: Run) -> Seen:
    block = Mix(lambda linear, batch: linear(batch.x).tanh() * batch.scale)
    return step(run, block, Batch(leaf(3, 4), None))


@case("a tensor inside an object of the user's own")
def test_opaque_object(run: Run) -> Seen:
    class Holder:
        def __init__(self, x: paddle.Tensor) -> None:
            self.x = x

    x = leaf(3, 4)
    block = Mix(lambda linear, holder: linear(holder.x).tanh())
    return {**step(run, block, Holder(x * 2)), "args": (), "x": x, "layer": block}


@case("None, numbers, strings, and a NumPy array")
def test_python_values(run: Run) -> Seen:
    def forward(linear: Any, x: paddle.Tensor, *rest: Any) -> paddle.Tensor:
        none, factor, activation, shift, flag = rest
        assert none is None and flag is True
        return getattr(F, activation)(linear(x)) * factor + paddle.to_tensor(shift)

    return step(run, Mix(forward), leaf(3, 4), None, 0.5, "gelu", np.float32([1, 2, 3, 4]), True)


@case("an integer tensor beside one with gradient")
def test_integers(run: Run) -> Seen:
    block = Mix(lambda linear, x, index: paddle.gather(linear(x).tanh(), index))
    return step(run, block, leaf(3, 4), paddle.to_tensor([2, 0, 2]))


@case("a boolean mask")
def test_mask(run: Run) -> Seen:
    block = Mix(lambda linear, x, mask: paddle.where(mask, linear(x), x).tanh())
    return step(run, block, leaf(3, 4), paddle.to_tensor([[True], [False], [True]]))


@case("no input needs a gradient: token ids into an embedding")
def test_no_input_needs_a_gradient(run: Run) -> Seen:
    block = paddle.nn.Sequential(paddle.nn.Embedding(5, 4), paddle.nn.Linear(4, 4))
    return step(run, block, paddle.to_tensor([[0, 3], [3, 1]]))


@case("no input needs a gradient: a batch of floats")
def test_no_float_input_needs_a_gradient(run: Run) -> Seen:
    return step(run, Mix(lambda linear, x: linear(x).tanh()), leaf(3, 4, stop_gradient=True))


@case("an embedding with sparse gradients")
def test_sparse_gradients(run: Run) -> Seen:
    block = paddle.nn.Sequential(paddle.nn.Embedding(5, 4, sparse=True), paddle.nn.Tanh())
    return step(run, block, paddle.to_tensor([[0, 3], [3, 1]]))


@case("no argument at all")
def test_no_argument(run: Run) -> Seen:
    block = Mix(lambda linear: (linear.weight @ linear.weight).tanh() + linear.bias)
    return step(run, block)


@case("a parameter as argument")
def test_parameter(run: Run) -> Seen:
    owner = paddle.nn.Linear(4, 4)
    block = Mix(lambda linear, x, weight: linear(x).tanh() @ weight)
    return {**step(run, block, leaf(3, 4), owner.weight), "owner": owner}


@case("a parameter as argument, used twice: tied weights")
def test_tied_weights(run: Run) -> Seen:
    embedding = paddle.nn.Embedding(5, 4)
    x = embedding(paddle.to_tensor([[0, 3], [3, 1]]))
    y = run(lambda x, weight: (x.tanh() @ weight.T).exp(), x, embedding.weight)
    y.sum().backward()
    return {"y": y, "embedding": embedding}


@case("the same tensor twice")
def test_same_tensor_twice(run: Run) -> Seen:
    x = leaf(3, 4)
    return step(run, Mix(lambda linear, a, b: linear(a) * b.exp()), x, x)


@case("the same tensor by position, by keyword and in a list")
def test_same_tensor_everywhere(run: Run) -> Seen:
    x = leaf(3, 4)
    block = Mix(lambda linear, a, b, c=None: linear(a) * b[0].exp() * c if a is c else a)
    return step(run, block, x, [x], c=x)


@case("some frozen parameters")
def test_some_frozen(run: Run) -> Seen:
    block = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 4))
    block[0].weight.stop_gradient = True
    return step(run, block, leaf(3, 4))


@case("all parameters frozen")
def test_all_frozen(run: Run) -> Seen:
    block = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 4))
    for parameter in block.parameters():
        parameter.stop_gradient = True
    return step(run, block, leaf(3, 4))


@case("nothing needs a gradient", has_gradients=False)
def test_nothing_needs_a_gradient(run: Run) -> Seen:
    block = paddle.nn.Linear(4, 4)
    block.weight.stop_gradient = block.bias.stop_gradient = True
    return step(run, block, leaf(3, 4, stop_gradient=True))


@case("tensors of type {dtype}", dtype=["float64", "bfloat16"])
def test_dtypes(run: Run, dtype: str) -> Seen:
    return step(run, lambda x, y: x * y * x, leaf(3, 4, dtype=dtype), leaf(4, dtype=dtype))


@case("tensors with no dimension")
def test_no_dimension(run: Run) -> Seen:
    return step(run, lambda x, y: (x * y).exp(), leaf(3), leaf())


@case("a view of another tensor")
def test_view(run: Run) -> Seen:
    x = leaf(4, 4)
    y = run(lambda a, b: (a * b).exp(), (x * 2).transpose([1, 0]), (x * 3)[:, 1:2])
    y.sum().backward()
    return {"y": y, "x": x}


FUNCTIONS = ["function", "lambda", "method", "bound forward", "partial", "callable object"]


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


def test_change_in_place_before_the_backward_is_refused() -> None:
    y = leaf(4) * 2
    out = recompute(lambda y: (y + 1).tanh(), y)
    y.add_(paddle.ones([4]))
    with pytest.raises(RecomputeError, match=r"float32\[4\].*changed in place between"):
        out.sum().backward()


def test_an_argument_may_be_rebound_and_freed() -> None:
    x = leaf(3, 4)
    y = x * 2
    out = recompute(paddle.tanh, y)
    y = y + 1
    del y
    out.sum().backward()
    assert np.allclose(x.grad.numpy(), 2 * (1 - np.tanh(2 * x.numpy()) ** 2), atol=1e-6)


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
    [
        {"preserve_rng_state": True},
        {"preserve_rng_state": False},
        {"use_reentrant": True},
        {"use_reentrant": False},
        {"use_reentrant": True, "preserve_rng_state": False},
        {"offload_indices": [0]},
        {"offload_indices": []},
    ],
    ids=str,
)
def test_keywords_of_paddles_own_recompute(options: dict[str, Any]) -> None:
    gradients = []
    for call in (lambda f, *args: f(*args), lambda f, *args: recompute(f, *args, **options)):
        paddle.seed(1)
        x, layer = leaf(3, 4), paddle.nn.Linear(4, 4)
        loss_of(call(layer, upstream(x))).backward()
        gradients.append((x.grad.numpy(), layer.weight.grad.numpy()))
    for one, other in zip(*gradients, strict=True):
        assert np.array_equal(one, other)
