"""Random dygraph programs of nested blocks, and what running one leaves behind.

A program is plain data (dataclasses of numbers and names), so hypothesis can shrink it and print
it. `observe` builds its Layers and runs it, with every call of a block going through `Run`: the
plain call or ours. All operations take any shape, so every description is a program that runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from hypothesis import strategies as st

from paddle_recompute import RecomputeConfig, _nested, apply_recompute, keep
from tests.fuzz.dygraph_operations import (
    BINARY,
    GRADIENTS,
    IN_PLACE,
    LAYERS,
    RANDOM,
    SMOOTH,
    VIEWS,
    Tensor,
    rows,
)
from tests.recompute.contract import Run, Seen, clean_streams, plain, seen, state_of_the_process

# ----------------------------------------------------------------------------------- descriptions


@dataclass(frozen=True)
class Op:
    """One operation on the values that are there so far.

    Attributes:
        name: A key of one of the tables below, or of `CALLS`.
        first: Picks its first operand.
        second: Picks its second operand, or how it does what it does.
        blocks: What is called, if it is a call.
        is_kept: Whether the second forward does not run it (`keep`).
    """

    name: str
    first: int = 0
    second: int = 0
    blocks: tuple[Block, ...] = ()
    is_kept: bool = False


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


# ------------------------------------------------------------------------------ what is called

CALLS = ["call", "call", "loop", "raises", "chain"]
"""``loop``: a lambda that closes over the loop's variable; ``raises``: the caller catches it;
``chain``: Layers under a policy of `apply_recompute`, one of which may raise."""

OTHERS = ["flip mode", "change the argument"]

TWICE_DIFFERENTIABLE = {
    *CALLS, "tanh", "square", "mean", "turn", "flat", "fold", "add", "times", "no grad", "Linear",
    "noise", "detach", "best", "hooked",
}  # fmt: skip
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
    *["nothing"] * 4,
    "eval",
    "eval",
    "draw",
    "draw",
    "forward",
    *sorted(REFUSED_BETWEEN),
]
FINISHES = [
    "backward", "backward", "twice", "grad", "grad, then backward", "parts", "last only", "penalty",
]  # fmt: skip

numbers = st.integers(0, 5)
kept = st.sampled_from([False, False, True])


def operations(depth: int) -> st.SearchStrategy[Op]:
    """Operations with calls up to `depth` deep."""
    tables = [sorted(table) for table in TABLES]
    # One in twenty, so that most programs are neither refused nor full of them.
    rare = [*[name for table in tables for name in table if name not in REFUSED], *OTHERS, "spoil"]
    names = [st.sampled_from([name for name in one if name not in REFUSED]) for one in tables]
    simple = st.builds(
        Op, st.one_of([*names, st.sampled_from(rare)]), numbers, numbers, is_kept=kept
    )
    if depth == 0:
        return simple
    return st.one_of(simple, simple, calls(depth))


def calls(depth: int) -> st.SearchStrategy[Op]:
    """Calls of blocks, `depth` deep at most."""
    several = st.lists(blocks(depth - 1), min_size=1, max_size=2 + (depth == 1)).map(tuple)
    return st.builds(Op, st.sampled_from(CALLS), numbers, numbers, several, kept)


def blocks(depth: int) -> st.SearchStrategy[Block]:
    """Blocks with calls up to `depth` deep inside."""
    return st.builds(
        Block,
        st.lists(operations(depth), min_size=1, max_size=4).map(tuple),
        st.sampled_from(FORMS),
        st.sampled_from(["default", *OPTIONS]),
        st.sampled_from(RESULTS),
    )


_built = st.builds(
    Program,
    st.tuples(
        st.lists(operations(2), max_size=2), calls(3), st.lists(operations(2), max_size=2)
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


def _without_crashes(program: Program) -> Program:
    """Plain Paddle dies where the backward of a PyLayer runs twice (2.6.2 and 3.3.1).

    And it differentiates few operators twice.
    """
    names = {op.name for op in operations_in(program.body)}
    if "PyLayer" in names or (program.finish == "penalty" and names - TWICE_DIFFERENTIABLE):
        return dataclasses.replace(program, finish="backward")
    return program


programs = _built.map(_without_crashes)


def may_be_refused(program: Program) -> bool:
    """Whether the program does something that recompute is right to refuse."""
    names = {op.name for op in operations_in(program.body)}
    return bool(names & REFUSED) or program.between in REFUSED_BETWEEN


# ------------------------------------------------------------------------------------- running one


class Raised(Exception):
    """What a block raises on purpose."""


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
        config = RecomputeConfig(
            enable=self.run is not plain,
            checkpoints=[str(number) for number in range(len(chain))],
            policy=["all", "every_n"][op.first % 2],
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
        if not op.is_kept:
            return self.computed(op, layer, inner, values, x, y)
        call = plain if self.run is plain else keep
        return call(lambda x, y: self.computed(op, layer, inner, values, x, y), x, y)

    def computed(
        self,
        op: Op,
        layer: paddle.nn.Layer,
        inner: list[Built],
        values: list[Tensor],
        x: Tensor,
        y: Tensor,
    ) -> list[Tensor]:
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
                self.catch(block, described, x, op.is_kept)
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
            deep = types.SimpleNamespace(inner=types.SimpleNamespace(listed=[{"layer": block}]))
            return run(lambda x: deep.inner.listed[0]["layer"](x), x)
        if form == "keywords":
            return run(block, x, mask=None, cache={"y": y, "scale": 0.5})
        if form == "in containers":
            return run(block, [x, None], (y, {"again": x}))
        return block(x, y)

    def options(self, described: Block) -> dict[str, Any]:
        return {} if self.run is plain else OPTIONS[described.option]

    def catch(self, block: Built, described: Block, x: Tensor, is_kept: bool) -> None:
        def raising(x: Tensor) -> None:
            block(x)
            raise Raised

        run: Any = functools.partial(self.run, **self.options(described))
        try:
            (keep if is_kept and self.run is not plain else run)(raising, x)
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
    elif program.finish == "penalty" and leaves:
        gradients = paddle.grad(loss, leaves, create_graph=True, allow_unused=True)
        (loss + sum(one.square().sum() for one in gradients if one is not None)).backward()
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
