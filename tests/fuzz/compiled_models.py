"""Random small models for `compile_model`: what models of users do, and Paddle converts wrongly."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import paddle

nn, functional = paddle.nn, paddle.nn.functional
WIDTH = 4
Model = Any


def linear(model: Model, h: Any, x: Any, at: int) -> Any:
    return model.linears[str(at)](h)


def layer_norm(model: Model, h: Any, x: Any, at: int) -> Any:
    return model.norms[str(at)](h)


def batch_norm(model: Model, h: Any, x: Any, at: int) -> Any:
    return model.batch_norms[str(at)](h)


def dropout(model: Model, h: Any, x: Any, at: int) -> Any:
    return functional.dropout(h, 0.3, training=model.training)


def gelu(model: Model, h: Any, x: Any, at: int) -> Any:
    return functional.gelu(h)


def softmax_mix(model: Model, h: Any, x: Any, at: int) -> Any:
    return functional.softmax(h @ h.t()) @ h


def add_input(model: Model, h: Any, x: Any, at: int) -> Any:
    return h + x


def halves(model: Model, h: Any, x: Any, at: int) -> Any:
    left, right = paddle.split(h, 2, axis=1)
    return paddle.concat([right * 2, left], axis=1)


def write_column(model: Model, h: Any, x: Any, at: int) -> Any:
    h = h * 1.0
    h[:, :1] = 0.5
    return h


def write_row(model: Model, h: Any, x: Any, at: int) -> Any:
    h = h * 1.0
    h[0] = 0.0
    return h


def write_half(model: Model, h: Any, x: Any, at: int) -> Any:
    h = h * 1.0
    h[:, :2] = h[:, 2:] * 0.5
    return h


def write_input_row(model: Model, h: Any, x: Any, at: int) -> Any:
    h = model.linears[str(at)](h)
    h[-1] = x[0]
    return h


def write_into_argument(model: Model, h: Any, x: Any, at: int) -> Any:
    if x.stop_gradient:
        x[0] = 0.25
    return h + x


def early_return(model: Model, h: Any, x: Any, at: int) -> Any:
    if x.mean() > 0:
        return h * 2
    h = model.norms[str(at)](h)
    return h * h


def early_return_of_part(model: Model, h: Any, x: Any, at: int) -> Any:
    h = model.linears[str(at)](h)
    if h.sum() > 1:
        return h
    return h + 1


def both_branches(model: Model, h: Any, x: Any, at: int) -> Any:
    if h.mean() > 0:
        h = model.linears[str(at)](h)
        h = h + 1
    else:
        h = h * 0.5
    return h


def keep_auxiliary(model: Model, h: Any, x: Any, at: int) -> Any:
    model.auxiliary = h.square().mean()
    return h


def count_calls(model: Model, h: Any, x: Any, at: int) -> Any:
    model.calls += 1
    return h / model.calls


def remember(model: Model, h: Any, x: Any, at: int) -> Any:
    model.seen.append(h.detach())
    return h


def fill_cache(model: Model, h: Any, x: Any, at: int) -> Any:
    model.cache["h"] = h.detach()
    return h * 1.5


def rebind_buffer(model: Model, h: Any, x: Any, at: int) -> Any:
    model.mean = model.mean * 0.9 + h.detach().mean(0) * 0.1
    return h - model.mean


def write_buffer(model: Model, h: Any, x: Any, at: int) -> Any:
    model.mean[0] = model.mean[0] + 1.0
    return h - model.mean


def set_buffer(model: Model, h: Any, x: Any, at: int) -> Any:
    model.mean.set_value(model.mean * 0.9 + h.detach().mean(0) * 0.1)
    return h - model.mean


def assign_to_buffer(model: Model, h: Any, x: Any, at: int) -> Any:
    paddle.assign(model.mean * 0.9 + h.detach().mean(0) * 0.1, model.mean)
    return h - model.mean


def add_to_buffer(model: Model, h: Any, x: Any, at: int) -> Any:
    model.mean.add_(paddle.ones([WIDTH]))
    return h - model.mean


def assign(model: Model, h: Any, x: Any, at: int) -> Any:
    h = h * 1.0
    paddle.assign(h * 2, h)
    return h


def add_in_place(model: Model, h: Any, x: Any, at: int) -> Any:
    h = h * 1.0
    h.add_(x)
    return h


def relu_in_place(model: Model, h: Any, x: Any, at: int) -> Any:
    return functional.relu_(h * 1.0)


def weight_norm(model: Model, h: Any, x: Any, at: int) -> Any:
    return model.weight_normed(h)


def spectral_norm(model: Model, h: Any, x: Any, at: int) -> Any:
    return model.spectral_normed(h)


def spectral_layer(model: Model, h: Any, x: Any, at: int) -> Any:
    return h @ model.spectral(model.linears[str(at)].weight)


def hooked_layer(model: Model, h: Any, x: Any, at: int) -> Any:
    return model.hooked(h)


def hook_on_tensor(model: Model, h: Any, x: Any, at: int) -> Any:
    h = h * 1.0
    h.register_hook(lambda gradient: gradient * 3)
    return h


class Triple(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 3


def pylayer(model: Model, h: Any, x: Any, at: int) -> Any:
    return Triple.apply(h)


def detached(model: Model, h: Any, x: Any, at: int) -> Any:
    return h + h.detach() * 2


def without_gradient(model: Model, h: Any, x: Any, at: int) -> Any:
    with paddle.no_grad():
        other = h * 2
    return h + other


def stopped(model: Model, h: Any, x: Any, at: int) -> Any:
    other = h * 1
    other.stop_gradient = True
    return h + other


def seeded(model: Model, h: Any, x: Any, at: int) -> Any:
    paddle.seed(3)
    return functional.dropout(h, 0.3, training=model.training)


def reads_rows(model: Model, h: Any, x: Any, at: int) -> Any:
    return h * float(x.shape[0])


def reshaped(model: Model, h: Any, x: Any, at: int) -> Any:
    rows = x.shape[0]
    return h.reshape([rows * 2, 2]).sum(1).reshape([rows, 2]).tile([1, 2])


def numpy_noise(model: Model, h: Any, x: Any, at: int) -> Any:
    return h * (1.0 + random.random())


def own_number(model: Model, h: Any, x: Any, at: int) -> Any:
    return h * model.scale


PLAIN = [
    linear, layer_norm, batch_norm, dropout, gelu, softmax_mix, add_input, halves, both_branches,
    detached, without_gradient, own_number, hooked_layer,
]  # fmt: skip
ODD = [
    write_column, write_row, write_half, write_input_row, write_into_argument, early_return,
    early_return_of_part, keep_auxiliary, count_calls, remember, fill_cache, rebind_buffer,
    write_buffer, set_buffer, assign_to_buffer, add_to_buffer, assign, add_in_place, relu_in_place,
    weight_norm, spectral_norm, spectral_layer, hook_on_tensor, pylayer, stopped, seeded,
    reads_rows, reshaped, numpy_noise,
]  # fmt: skip
Operation = Callable[[Model, Any, Any, int], Any]


WITH_LINEAR = {linear, write_input_row, early_return_of_part, both_branches, spectral_layer}


def _made(
    make: Callable[[], nn.Layer], operations: list[Operation], users: set[Operation]
) -> nn.LayerDict:
    places = [str(at) for at, operation in enumerate(operations) if operation in users]
    return nn.LayerDict({place: make() for place in places})


class Sequence(nn.Layer):
    """Operations one after the other; the last one counts as often as `times` says."""

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self.operations = operations
        # What no operation reads is left out: a conversion takes its time for every parameter.
        self.linears = _made(lambda: nn.Linear(WIDTH, WIDTH), operations, WITH_LINEAR)
        self.norms = _made(lambda: nn.LayerNorm(WIDTH), operations, {layer_norm, early_return})
        self.batch_norms = _made(lambda: nn.BatchNorm1D(WIDTH), operations, {batch_norm})
        if hooked_layer in operations:
            self.hooked = nn.Linear(WIDTH, WIDTH)
            self.hooked.register_forward_post_hook(lambda layer, inputs, output: output * 0.5)
        self.register_buffer("mean", paddle.zeros([WIDTH]))
        if weight_norm in operations:
            self.weight_normed = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
        if spectral_norm in operations:
            self.spectral_normed = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        if spectral_layer in operations:
            self.spectral = nn.SpectralNorm([WIDTH, WIDTH], power_iters=1)
        self.auxiliary: Any = None
        self.calls = 0
        self.scale = 1.5
        self.seen: list[Any] = []
        self.cache: dict[str, Any] = {}

    def forward(self, x: Any, times: int = 1) -> Any:
        h = x
        for at, operation in enumerate(self.operations):
            h = operation(self, h, x, at)
        return h * times


class Twice(nn.Layer):
    """A Layer that is called twice, and one before it."""

    def __init__(self, inner: Sequence) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: Any, times: int = 1) -> Any:
        return self.inner(self.inner(self.first(x), times))


def random_model(choose: random.Random) -> nn.Layer:
    """One to five operations, one or two of them odd."""
    operations = choose.choices(PLAIN, k=choose.randint(1, 2))
    operations += choose.choices(ODD, k=choose.choice([0, 1, 1, 2]))
    choose.shuffle(operations)
    if choose.random() < 0.7 or WITH_LINEAR.isdisjoint(operations):  # something to train
        operations.insert(0, linear)
    model = Sequence(operations)
    return Twice(model) if choose.random() < 0.2 else model
