"""Random static graphs: the same seed and length build the same graph, in either representation.

A graph is a list of instructions. Each takes variables ``[BATCH, HIDDEN]`` of those before it and
adds one; any of them may become a checkpoint. A shorter length is a prefix of the longer graph.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import paddle
from paddle.nn import functional

from paddle_recompute.recompute import recompute_wrapper
from paddle_recompute.static_graph import mark_checkpoint
from tests.static_graph.models import HIDDEN, Block, data

IS_PIR = not paddle.__version__.startswith("2.")
Instruction = Callable[["Graph"], Any]


class Graph:
    """Builds one random graph in the default Program.

    Args:
        seed: Which graph.
        length: Its number of instructions.
        wraps: Whether the Layers that may be wrapped are; a graph without recompute has them bare.

    Attributes:
        names: Its checkpoints.
        lines: What it consists of, for a human.
        needs_order: Whether an instruction draws random numbers, or writes to a variable that
            others see.
    """

    def __init__(self, seed: int, length: int, *, wraps: bool) -> None:
        self.random = random.Random(seed)
        self.length = length
        self.wraps = wraps
        self.values: list[Any] = []
        self.layers: list[Any] = []
        self.names: list[str] = []
        self.lines: list[str] = []
        self.needs_order = False
        self.wrapped = 0

    def build(self) -> Any:
        """Build it; returns the loss."""
        how_often = self.random.choice([0.1, 0.3, 0.6])
        self.values.append(data())
        self.values.append(self.new_layer()(self.values[0]))
        for number in range(self.length):
            name = self.random.choice(NAMES)
            self.lines.append(name)
            value = INSTRUCTIONS[name](self)
            self.values.append(value)
            marks, backs = self.random.random() < how_often, self.random.random() < 0.3
            if marks:
                self.mark(value, f"c{number}")
            if backs:  # a layer between, so that there is a parameter behind each part
                self.values.append(paddle.tanh(self.new_layer()(value)))
        first = functional.normalize(self.values[-1] + self.pick()).square()
        loss = (first * self.new_layer()(self.values[-1])).mean()
        if self.random.random() < 0.4:
            loss = loss + 0.5 * paddle.tanh(self.pick()).mean()
        if not self.names and not self.wrapped:
            self.mark(self.values[1], "first")
        return loss

    def mark(self, value: Any, name: str) -> None:
        """Make `value` a checkpoint."""
        mark_checkpoint(value, name)
        self.names.append(name)
        self.lines[-1:] = [f"{self.lines[-1] if self.lines else ''} -> {name}"]

    def pick(self) -> Any:
        """A variable, more often a late one."""
        last = len(self.values) - 1
        index = max(self.random.randint(0, last), self.random.randint(0, last))
        return self.values[index]

    def new_layer(self) -> Any:
        """A new Linear."""
        self.layers.append(paddle.nn.Linear(HIDDEN, HIDDEN))
        return self.layers[-1]

    def number(self, low: float, high: float) -> float:
        """A random number."""
        return round(self.random.uniform(low, high), 2)


# ------------------------------------------------------------------------------ instructions


SIMPLE: dict[str, Instruction] = {
    "exponential": lambda graph: paddle.exp(-paddle.abs(graph.pick())),
    "linear": lambda graph: graph.new_layer()(graph.pick()),
    "shared_linear": lambda graph: graph.random.choice(graph.layers)(graph.pick()),
    "add": lambda graph: graph.pick() + graph.pick(),
    "multiply": lambda graph: paddle.tanh(graph.pick()) * graph.pick(),
    "scale": lambda graph: graph.pick() * graph.number(-2, 2) + graph.number(-1, 1),
    "divide": lambda graph: graph.pick() / (1.5 + paddle.tanh(graph.pick())),
    "norm": lambda graph: functional.layer_norm(graph.pick(), [HIDDEN]),
    "batch_norm": lambda graph: paddle.nn.BatchNorm1D(HIDDEN)(graph.pick()),
    "unsqueezed": lambda graph: paddle.squeeze(
        functional.gelu(paddle.unsqueeze(graph.pick(), 1)), 1
    ),
    "summed": lambda graph: paddle.add_n([graph.pick(), graph.pick(), graph.pick()]) * 0.5,
}


def activation(graph: Graph) -> Any:
    kind = graph.random.choice(["tanh", "gelu", "sigmoid", "relu", "silu", "softmax", "elu"])
    return getattr(functional, kind)(graph.pick())


def tied(graph: Graph) -> Any:
    layer = graph.random.choice(graph.layers)
    return paddle.tanh(paddle.matmul(graph.pick(), layer.weight, transpose_y=True))


def split_concat(graph: Graph) -> Any:
    a, b = paddle.split(graph.pick(), 2, axis=-1)
    if graph.random.random() < 0.5:
        graph.values.append(paddle.concat([a, a], axis=-1))
    return paddle.concat([paddle.tanh(b), a * b], axis=-1)


def attention(graph: Graph) -> Any:
    query, key, value = graph.pick(), graph.pick(), graph.pick()
    weights = functional.softmax(paddle.matmul(query, key, transpose_y=True) * 0.3)
    return paddle.matmul(weights, value)


def reshaped(graph: Graph) -> Any:
    x = paddle.reshape(graph.pick(), [-1, 2, HIDDEN // 2])
    if graph.random.random() < 0.5:
        x = paddle.transpose(x, [0, 2, 1])
    return paddle.reshape(paddle.tanh(x), [-1, HIDDEN])


def sliced(graph: Graph) -> Any:
    x = graph.pick()
    return paddle.concat([x[:, 1:], x[:, :1] * 2], axis=-1)


def gathered(graph: Graph) -> Any:
    x = graph.pick()
    return paddle.take_along_axis(x, paddle.argsort(graph.pick(), axis=-1), -1)


def chosen(graph: Graph) -> Any:
    return paddle.where(graph.pick() > 0, graph.pick(), paddle.tanh(graph.pick()))


def reduced(graph: Graph) -> Any:
    x = graph.pick()
    return x - x.mean(axis=-1, keepdim=True) + graph.pick().max(axis=0, keepdim=True)


def stacked(graph: Graph) -> Any:
    parts = paddle.unbind(paddle.stack([graph.pick(), graph.pick()]))
    return parts[0] * 0.5 + paddle.sin(parts[1])


def dropout(graph: Graph) -> Any:
    graph.needs_order = True
    mode = graph.random.choice(["upscale_in_train", "downscale_in_infer"])
    training = graph.random.random() < 0.8
    return functional.dropout(graph.pick(), graph.number(0, 0.9), training=training, mode=mode)


def noise(graph: Graph) -> Any:
    graph.needs_order = True
    return graph.pick() * (1 + 0.1 * paddle.randn([1, HIDDEN]))


def alpha_dropout(graph: Graph) -> Any:
    graph.needs_order = True
    return functional.alpha_dropout(graph.pick(), 0.3)


def detached(graph: Graph) -> Any:
    x = graph.pick()
    fixed = x.detach()
    graph.values.append(fixed)
    kind = graph.random.randint(0, 3)
    if kind == 0:
        return fixed
    if kind == 1:
        return paddle.tanh(x) + fixed * 2
    if kind == 2:
        return paddle.exp(-paddle.abs(x)) * fixed
    return functional.gelu(x) * fixed.detach()


def detached_parameter(graph: Graph) -> Any:
    layer = graph.random.choice(graph.layers)
    return graph.pick() * layer.bias.detach() + paddle.sum(paddle.tanh(layer.weight.detach()), 0)


def assigned(graph: Graph) -> Any:
    x = graph.pick()
    copy = paddle.assign(x)
    graph.values.append(paddle.tanh(x))
    return copy * graph.number(-2, 2)


def passed_on(graph: Graph) -> Any:
    x = graph.pick()
    x.stop_gradient = x.stop_gradient
    return x * 1.0


def branch(graph: Graph) -> Any:
    x = graph.pick()
    other = graph.pick()
    low = graph.number(-1, 1)
    return paddle.static.nn.cond(
        x.mean() > low, lambda: paddle.exp(-paddle.abs(x)), lambda: other * 0.5
    )


def loop(graph: Graph) -> Any:
    x = graph.pick() * 1.0  # what a loop starts from cannot be used after it: 3.3.1 fails
    layer = graph.random.choice(graph.layers)
    count = paddle.full([1], 0, "int64")
    _, looped = paddle.static.nn.while_loop(
        lambda i, h: i < 2, lambda i, h: [i + 1, paddle.tanh(layer(h)) * 1.5], [count, x]
    )
    return looped


def block(graph: Graph) -> Any:
    """A Layer that may be wrapped; sometimes called twice."""
    layer = Block(dropout=graph.random.choice([0.0, 0.2]))
    graph.needs_order = True
    graph.wrapped += 1
    if graph.wraps:
        layer = recompute_wrapper(layer)
    x = layer(graph.pick())
    if graph.random.random() < 0.3:
        graph.values.append(x)
        x = layer(graph.pick())
    return x


class Aliases(paddle.nn.Layer):
    """A block whose output or insides share memory."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.inner = paddle.nn.Linear(HIDDEN, HIDDEN)
        self.outer = paddle.nn.Linear(HIDDEN, HIDDEN)
        self.kind = kind

    def forward(self, x: Any) -> Any:
        hidden = self.inner(x)
        if self.kind == 0:
            hidden = paddle.tanh(hidden) + hidden.detach() * 2
        elif self.kind == 1:
            hidden = functional.gelu(hidden * x.detach()) + x
        else:
            fixed = hidden.detach()
            hidden = paddle.exp(-paddle.abs(fixed)) * hidden
            return self.outer(hidden) + fixed
        return self.outer(hidden)


def alias_block(graph: Graph) -> Any:
    layer = Aliases(graph.random.randint(0, 2))
    graph.wrapped += 1
    if graph.wraps:
        layer = recompute_wrapper(layer)
    return layer(graph.pick())


def frozen(graph: Graph) -> Any:
    layer = graph.new_layer()
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    graph.layers.pop()
    return paddle.tanh(layer(graph.pick()))


def written(graph: Graph) -> Any:
    """A variable that is written to after it was used."""
    graph.needs_order = True
    x = paddle.tanh(graph.pick() * 3)
    graph.values.append(functional.gelu(x))
    paddle.assign(graph.pick() * 2, x)
    return x + 1


def written_parts(graph: Graph) -> Any:
    graph.needs_order = True
    x = functional.gelu(graph.new_layer()(graph.pick()))
    before = paddle.exp(-paddle.abs(x))
    x[:, 0] = 0.5
    if graph.random.random() < 0.5:
        x[:, 1:3] = x[:, 3:5] * 2
    return x * before


def written_alias(graph: Graph) -> Any:
    graph.needs_order = True
    x = functional.gelu(graph.new_layer()(graph.pick()))
    early = paddle.exp(-paddle.abs(x))
    fixed = x.detach()
    paddle.assign(graph.pick().detach() * 0.1, fixed)
    return functional.gelu(x) * fixed + paddle.tanh(early)


def counted(graph: Graph) -> Any:
    graph.needs_order = True
    one = paddle.nn.initializer.Constant(1.0)
    counter = paddle.create_parameter(
        [1], "float32", f"counter{len(graph.values)}", default_initializer=one
    )
    counter.stop_gradient = True
    x = paddle.tanh(graph.pick() * (counter * 0.1 + 0.5))
    paddle.increment(counter)
    return x


INSTRUCTIONS: dict[str, Instruction] = {
    **SIMPLE,
    **{
        one.__name__: one
        for one in (
            activation, tied, split_concat, attention, reshaped, sliced, gathered, chosen, reduced,
            stacked, dropout, noise, alpha_dropout, detached, detached_parameter, assigned,
            passed_on, branch, loop, block, alias_block, frozen, written, counted, written_alias,
        )
    },
}  # fmt: skip
if IS_PIR:  # Paddle 2.6 refuses an assignment to parts outside of to_static
    INSTRUCTIONS["written_parts"] = written_parts
NAMES = [*INSTRUCTIONS, "detached", "block"]  # these two twice as often
