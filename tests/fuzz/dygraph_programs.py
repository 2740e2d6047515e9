"""Random dygraph programs of nested blocks, and what running one leaves behind.

A program is plain data (dataclasses of numbers and names), so hypothesis can shrink it and print
it. `observe` builds its Layers and runs it, with every call of a block going through `Run`: the
plain call or ours. All operations take any shape, so every description is a program that runs.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from hypothesis import strategies as st
from paddle.nn import functional as F

from paddle_recompute import RecomputeConfig, _nested, apply_recompute
from tests.recompute.contract import Run, Seen, clean_streams, seen, state_of_the_process

Tensor = paddle.Tensor

# ----------------------------------------------------------------------------------- descriptions


@dataclass(frozen=True)
class Op:
    """One operation on the values that are there so far.

    Attributes:
        name: A key of one of the tables below, or of `CALLS`.
        first: Picks its first operand.
        second: Picks its second operand, or how it does what it does.
        blocks: What is called, if it is a call.
    """

    name: str
    first: int = 0
    second: int = 0
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True)
class Block:
    """A function that is recomputed, or called plainly: see `FORMS`, `OPTIONS` and `RESULTS`."""

    ops: tuple[Op, ...]
    form: str = "layer"
    option: str = "default"
    result: str = "last"


@dataclass(frozen=True)
class Program:
    """Steps of training: `body` is called, then comes `between`, then `finish`."""

    body: tuple[Op, ...]
    inputs: tuple[str, ...] = ("gradient",)
    between: str = "nothing"
    finish: str = "backward"
    steps: int = 1


# -------------------------------------------------------------------------------- operations


def rows(x: Tensor) -> Tensor:
    """`x` as rows of 4 numbers, two at least."""
    if len(x.shape) >= 2 and x.shape[-1] == 4 and x.size >= 8:
        return x
    return x.mean().reshape([1, 1]).expand([2, 4]) + paddle.arange(8.0).reshape([2, 4])


def along(x: Tensor, axis: int, what: Any) -> Tensor:
    """`x` indexed by `what` along `axis`."""
    if not x.shape:
        return x.reshape([1])
    place: list[Any] = [slice(None)] * len(x.shape)
    place[axis % len(x.shape)] = what
    return x[tuple(place)]


def longest(x: Tensor) -> int:
    return int(np.argmax(x.shape)) if x.shape else 0


def turn(x: Tensor, by: int) -> Tensor:
    rank = len(x.shape)
    return x.transpose([(axis + 1 + by) % rank for axis in range(rank)]) if rank > 1 else x * 1


def own(x: Tensor) -> Tensor:
    return x * 1


def add_to_view(x: Tensor) -> Tensor:
    copy = own(x)
    view = along(copy, longest(copy), slice(0, 1))
    view.add_(paddle.ones([1]))
    return copy


def set_item(x: Tensor, y: Tensor) -> Tensor:
    if not x.shape:
        return x + y.mean()
    copy = own(x)
    copy[0] = y.mean()
    return copy


def spoil(x: Tensor) -> Tensor:
    """What autograd refuses: the square's operand changes after it was saved."""
    copy = own(x)
    square = copy * copy
    copy.add_(paddle.ones([1]))
    return square + copy


def hooked(x: Tensor, by: int) -> Tensor:
    result = own(x)
    if not result.stop_gradient:
        result.register_hook(lambda gradient: gradient * (0.5 + by) + 0.1)
    return result


def hook_here(x: Tensor, by: int) -> Tensor:
    if not x.stop_gradient:
        x.register_hook(lambda gradient: gradient * (1.5 + by))
    return x.tanh()


def without_gradient(x: Tensor) -> Tensor:
    with paddle.no_grad():
        return x * 2


def stopped(x: Tensor) -> Tensor:
    result = own(x)
    result.stop_gradient = True
    return result


def pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x, y) if x.shape == y.shape else (x, y.mean())


def attend(x: Tensor, y: Tensor) -> Tensor:
    x, y = rows(x).reshape([-1, 4]), rows(y).reshape([-1, 4])
    return F.softmax(x @ y.transpose([1, 0]) * 0.3) @ y


def heads(x: Tensor, by: int) -> Tensor:
    parts = rows(x).reshape([-1, 2, 2]).transpose([1, 0, 2])
    return paddle.unbind(parts, axis=0)[by % 2]


class Turned(paddle.autograd.PyLayer):
    """Saves a transposed tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(turn(x, 0))
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensor()
        rank = len(x.shape)
        return gradient * 2 * (x.transpose([(axis - 1) % rank for axis in range(rank)]))


SMOOTH: dict[str, Callable[[Tensor, int], Tensor]] = {
    "tanh": lambda x, by: x.tanh(),
    "exp": lambda x, by: (x * 0.2).clip(-3, 3).exp(),
    "square": lambda x, by: x * x * 0.5,
    "gelu": lambda x, by: F.gelu(x),
    "softmax": lambda x, by: F.softmax(x) if x.shape else F.sigmoid(x),
    "mean": lambda x, by: x.mean(-1, keepdim=True) if x.shape else own(x),
}
VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "turn": turn,
    "tail": lambda x, by: along(x, longest(x), slice(1, None)) if x.size > 1 else x * 1,
    "every second": lambda x, by: along(x, longest(x), slice(by % 2, None, 2)) if x.size > 1 else x,
    "one": lambda x, by: along(x, by, 0) if x.shape else x,
    "real": lambda x, by: paddle.real(paddle.complex(x, x * 0.5)),
    "imaginary": lambda x, by: paddle.imag(paddle.complex(x * 0.5, x)),
    "expand": lambda x, by: x.unsqueeze(0).expand([2, *x.shape]) if x.size < 64 else own(x),
    "flat": lambda x, by: x.reshape([-1]),
    "fold": lambda x, by: x.reshape([2, -1]) if x.size % 2 == 0 and x.size else own(x),
    "last half": lambda x, by: (
        paddle.split(x, 2, axis=-1)[1] if x.shape and x.shape[-1] % 2 == 0 else own(x)
    ),
    "diagonal": lambda x, by: paddle.diagonal(x, axis1=-2, axis2=-1) if len(x.shape) > 1 else x * 1,
    "flip": lambda x, by: x.flip([by % len(x.shape)]) if x.shape else own(x),
    "head": heads,
}
IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda x, y: own(x).add_(y.mean()),
    "tanh_": lambda x, y: own(x).tanh_(),
    "scale_": lambda x, y: own(x).scale_(0.7),
    "add_ to a view": lambda x, y: add_to_view(x),
    "set an item": set_item,
    "spoil": lambda x, y: spoil(x),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: paddle.add(*pair(x, y)),
    "times": lambda x, y: paddle.multiply(*pair(x, y.tanh())),
    "attend": attend,
    "where": lambda x, y: paddle.where(x > 0, x, x * y.mean()),
}
GRADIENTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "hooked": hooked,
    "hook here": hook_here,
    "detach": lambda x, by: x.detach() * x,
    "no grad": lambda x, by: without_gradient(x),
    "stopped": lambda x, by: stopped(x),
    "PyLayer": lambda x, by: Turned.apply(x) if x.shape else x * x,
}
RANDOM: dict[str, Callable[[Tensor, int], Tensor]] = {
    "noise": lambda x, by: x * (paddle.rand(x.shape) + 0.5),
    "NumPy noise": lambda x, by: x * float(np.random.rand()),
    "Python noise": lambda x, by: x * random.random(),
    "dropout": lambda x, by: F.dropout(x, 0.3),
}
LAYERS: dict[str, Callable[[], paddle.nn.Layer]] = {
    "Linear": lambda: paddle.nn.Linear(4, 4),
    "BatchNorm": lambda: paddle.nn.BatchNorm1D(4),
    "LayerNorm": lambda: paddle.nn.LayerNorm(4),
    "Dropout": lambda: paddle.nn.Dropout(0.4),
    "LSTM": lambda: paddle.nn.LSTM(4, 4),
    "GRU": lambda: paddle.nn.GRU(4, 2, direction="bidirect"),
    "spectral norm": lambda: paddle.nn.utils.spectral_norm(paddle.nn.Linear(4, 4)),
    "weight norm": lambda: paddle.nn.utils.weight_norm(paddle.nn.Linear(4, 4)),
    "attention": lambda: paddle.nn.MultiHeadAttention(4, 2, dropout=0.2),
}
CALLS = ["call", "call", "loop", "raises", "chain"]
"""``loop``: a lambda that closes over the loop's variable; ``raises``: the caller catches it;
``chain``: Layers under a policy of `apply_recompute`, one of which may raise."""

OTHERS = ["flip mode", "change the argument"]

REFUSED = {"change the argument", "spoil"}
"""Operations that recompute may refuse."""
REFUSED_BETWEEN = {"change an input", "change a weight"}

# ------------------------------------------------------------------------------------- strategies

TABLES = [SMOOTH, VIEWS, VIEWS, IN_PLACE, BINARY, GRADIENTS, RANDOM, LAYERS]
FORMS = [
    "layer", "lambda", "method", "partial", "default argument", "behind an object", "keywords",
    "in containers", "plain",
]  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "values": {"determinism_check": "values"},
    "none": {"determinism_check": "none"},
    "disk": {"offload": "disk"},
}
RESULTS = ["last", "last", "two", "dict", "nested"]
INPUTS = ["gradient", "gradient", "no gradient", "leaf"]
BETWEEN = [
    "nothing",
    "nothing",
    "nothing",
    "eval",
    "eval",
    "draw",
    "draw",
    "forward",
    *sorted(REFUSED_BETWEEN),
]
FINISHES = ["backward", "backward", "twice", "grad", "grad, then backward", "parts", "last only"]

numbers = st.integers(0, 5)


def operations(depth: int) -> st.SearchStrategy[Op]:
    """Operations with calls up to `depth` deep."""
    tables = [sorted(table) for table in TABLES]
    # One in twenty, so that most programs are neither refused nor full of them.
    rare = [*[name for table in tables for name in table if name not in REFUSED], *OTHERS, "spoil"]
    names = [st.sampled_from([name for name in one if name not in REFUSED]) for one in tables]
    simple = st.builds(Op, st.one_of([*names, st.sampled_from(rare)]), numbers, numbers)
    if depth == 0:
        return simple
    return st.one_of(simple, simple, calls(depth))


def calls(depth: int) -> st.SearchStrategy[Op]:
    """Calls of blocks, `depth` deep at most."""
    several = st.lists(blocks(depth - 1), min_size=1, max_size=3).map(tuple)
    return st.builds(Op, st.sampled_from(CALLS), numbers, numbers, several)


def blocks(depth: int) -> st.SearchStrategy[Block]:
    """Blocks with calls up to `depth` deep inside."""
    return st.builds(
        Block,
        st.lists(operations(depth), min_size=1, max_size=4).map(tuple),
        st.sampled_from(FORMS),
        st.sampled_from(["default", *OPTIONS]),
        st.sampled_from(RESULTS),
    )


programs = st.builds(
    Program,
    st.tuples(
        st.lists(operations(3), max_size=2), calls(3), st.lists(operations(3), max_size=2)
    ).map(lambda parts: (*parts[0], parts[1], *parts[2])),
    st.lists(st.sampled_from(INPUTS), min_size=1, max_size=3).map(tuple),
    st.sampled_from(BETWEEN),
    st.sampled_from(FINISHES),
    st.integers(1, 2),
)


def operations_in(ops: tuple[Op, ...]) -> Iterator[Op]:
    """All operations, also those inside of calls."""
    for op in ops:
        yield op
        for block in op.blocks:
            yield from operations_in(block.ops)


def may_be_refused(program: Program) -> bool:
    """Whether the program does something that recompute is right to refuse."""
    names = {op.name for op in operations_in(program.body)}
    return bool(names & REFUSED) or program.between in REFUSED_BETWEEN


# ------------------------------------------------------------------------------------- running one


class Raised(Exception):
    """What a block raises on purpose."""


@dataclass
class Holder:
    """A plain object with Layers behind it."""

    parts: list[dict[str, Any]] = field(default_factory=list)


class Deep:
    """A Layer two attributes deep in objects that are not Layers."""

    def __init__(self, layer: paddle.nn.Layer) -> None:
        self.inner = Inner(layer)


class Inner:
    def __init__(self, layer: paddle.nn.Layer) -> None:
        self.listed = [{"layer": layer}]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.listed[0]["layer"](*args, **kwargs)


class Built(paddle.nn.Layer):
    """The Layer of a `Block`."""

    def __init__(self, ops: tuple[Op, ...], result: str, run: Run) -> None:
        super().__init__()
        self.ops, self.result, self.run, self.raises = ops, result, run, False
        self.scale = self.create_parameter([1], default_initializer=F_ONE)
        self.layers = paddle.nn.LayerList()
        self.inner = paddle.nn.LayerList()
        for op in ops:
            self.layers.append(LAYERS.get(op.name, paddle.nn.Identity)())
            inner = [Built(block.ops, block.result, run) for block in op.blocks]
            self.inner.append(paddle.nn.LayerList(inner))
            if op.name == "chain":
                self.make_chain(op, self.inner[-1])
            weight = getattr(self.layers[-1], "weight", None)
            if op.second == 3 and weight is not None and op.name == "Linear":
                weight.register_hook(lambda gradient: gradient * 2 + 0.01)

    def make_chain(self, op: Op, chain: paddle.nn.LayerList) -> None:
        for number, block in enumerate(chain):
            block.raises = number == op.second
        policy = ["segments", "all", "every_n"][op.first % 3]
        config = RecomputeConfig(
            enable=self.run.__name__ != "plain",
            checkpoints=[str(number) for number in range(len(chain))],
            policy=policy,
            segments=1 if policy == "segments" else "auto",
        )
        apply_recompute(chain, config)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = list(_nested.tensors_in((args, kwargs)))
        values.append(values[0] * self.scale)
        for op, layer, inner in zip(self.ops, self.layers, self.inner, strict=True):
            values += self.results_of(op, layer, inner, values)
        if self.raises:
            raise Raised
        return in_form(values, self.result)

    def results_of(
        self, op: Op, layer: paddle.nn.Layer, inner: list[Built], values: list[Tensor]
    ) -> list[Tensor]:
        # Counted from the end: what was computed last is used most.
        x, y = (values[-1 - pick % len(values)] for pick in (op.first, op.second))
        for unary in (SMOOTH, VIEWS, GRADIENTS, RANDOM):
            if op.name in unary:
                return [unary[op.name](x, op.second)]
        for binary in (IN_PLACE, BINARY):
            if op.name in binary:
                return [binary[op.name](x, y)]
        if op.name in LAYERS:
            return [apply(layer, op.name, x)]
        if op.name == "flip mode":
            for one in self.sublayers():
                one.training = not one.training
            return []
        if op.name == "change the argument":
            if not values[0].is_leaf:
                values[0].add_(paddle.ones([1]))
            return []
        if op.name == "loop":
            h = x
            for block, _ in zip(inner, op.blocks, strict=True):
                h = last_tensor(self.run(lambda t: block(t), h))  # noqa: B023
            return [h]
        if op.name == "chain":
            h = x
            for block in inner:
                with contextlib.suppress(Raised):
                    h = last_tensor(block(h))
            return [h]
        results: list[Tensor] = []
        for block, described in zip(inner, op.blocks, strict=True):
            if op.name == "raises":
                self.catch(block, described, x)
            else:
                results += _nested.tensors_in(self.call(block, described, x, y))
        return results

    def call(self, block: Built, described: Block, x: Tensor, y: Tensor) -> Any:
        run, form = functools.partial(self.run, **self.options(described)), described.form
        if form == "layer":
            return run(block, x, y)
        if form == "lambda":
            return run(lambda x, y: block(x, y), x, y)
        if form == "method":
            return run(block.forward, x, y)
        if form == "partial":
            return run(functools.partial(block, x), y)
        if form == "default argument":
            return run(lambda x, block=block: block(x), x)
        if form == "behind an object":
            deep = Deep(block)
            return run(lambda x: deep.inner(x), x)
        if form == "keywords":
            return run(block, x, mask=None, cache={"y": y, "scale": 0.5})
        if form == "in containers":
            return run(block, [x, None], (y, {"again": x}))
        return block(x, y)

    def options(self, described: Block) -> dict[str, Any]:
        return {} if self.run.__name__ == "plain" else OPTIONS[described.option]

    def catch(self, block: Built, described: Block, x: Tensor) -> None:
        def raising(x: Tensor) -> None:
            block(x)
            raise Raised

        try:
            functools.partial(self.run, **self.options(described))(raising, x)
        except Raised:
            pass
        else:
            raise AssertionError("an exception was lost")


F_ONE = paddle.nn.initializer.Constant(1.25)


def apply(layer: paddle.nn.Layer, name: str, x: Tensor) -> Tensor:
    x = rows(x)
    if name == "BatchNorm":
        x = x.reshape([-1, 4])
    if name in ("LSTM", "GRU", "attention"):
        x = layer(x.reshape([1, -1, 4]))
        return x[0] if isinstance(x, tuple) else x
    return layer(x)


def last_tensor(value: Any) -> Tensor:
    return list(_nested.tensors_in(value))[-1]


def in_form(values: list[Tensor], result: str) -> Any:
    if result == "two":
        return values[-1], values[0]
    if result == "dict":
        return {"last": values[-1], "first": values[0], "nothing": None}
    if result == "nested":
        return [values[-1], (values[-2], {"text": "ok"})]
    return values[-1]


def loss_of(values: Any) -> Tensor:
    loss = paddle.zeros([])
    for number, value in enumerate(_nested.tensors_in(values), start=1):
        if value.is_floating_point() and value.size:
            loss = loss + (value.clip(-4, 4) * value.tanh()).mean() * number
    return loss


def observe(program: Program, run: Run) -> Seen:
    """Everything that the program leaves behind: a readable place -> the value there."""
    with clean_streams():
        model = Built(program.body, "nested", run)
        inputs = []
        for kind in program.inputs:
            tensor = paddle.randn([3, 2, 4])
            tensor.stop_gradient = kind == "no gradient"
            inputs.append(tensor)
        noted: list[Any] = []
        for _ in range(program.steps):
            given = [
                tensor * 2 if kind == "gradient" else tensor
                for tensor, kind in zip(inputs, program.inputs, strict=True)
            ]
            outputs = model(*given)
            noted.append(outputs)
            between(program, model, given, noted)
            finish(program, inputs, outputs, noted)
            model.train()
        found = {"inputs": inputs, "noted": noted, "model": model}
        return {**dict(seen(found)), **state_of_the_process()}


def between(program: Program, model: Built, given: list[Tensor], noted: list[Any]) -> None:
    if program.between == "eval":
        model.eval()
    elif program.between == "draw":
        noted.append(paddle.rand([2]))
    elif program.between == "forward":
        noted.append(model(*given))
    elif program.between == "change an input" and not given[0].is_leaf:
        given[0].add_(paddle.ones([1]))
    elif program.between == "change a weight":
        model.scale.set_value(model.scale * 2)


def finish(program: Program, inputs: list[Tensor], outputs: Any, noted: list[Any]) -> None:
    tensors = list(_nested.tensors_in(outputs))
    loss = loss_of(tensors[-1:] if program.finish == "last only" else tensors)
    if loss.stop_gradient:
        return
    leaves = [tensor for tensor in inputs if not tensor.stop_gradient]
    if program.finish.startswith("grad") and leaves:
        more = program.finish != "grad"
        noted.append(paddle.grad(loss, leaves, allow_unused=True, retain_graph=more))
        if more:
            loss.backward()
    elif program.finish == "twice":
        loss.backward(retain_graph=True)
        loss.backward()
    elif program.finish == "parts":
        for tensor in tensors:
            part = loss_of(tensor)
            if not part.stop_gradient:
                part.backward(retain_graph=True)
    else:
        loss.backward()
