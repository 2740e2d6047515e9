"""Models with one thing that people write in a forward, which Paddle may convert wrongly.

Each `Block` takes ``[rows, WIDTH]`` and the model's input, and returns ``[rows, WIDTH]``. `Small`
puts one of them into a model, `random_model` several.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional

WIDTH = 4


class Block(nn.Layer):
    """`number` varies what a block does."""

    def __init__(self, number: float = 2.0) -> None:
        super().__init__()
        self.number = number
        self.prepare()

    def prepare(self) -> None:
        pass


class WithLinear(Block):
    def prepare(self) -> None:
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Any, x: Any) -> Any:
        return self.inner(h)


# ------------------------------------------------------------------------------ what is converted


class Dense(WithLinear):
    def forward(self, h: Any, x: Any) -> Any:
        return functional.gelu(self.inner(h))


class LayerNormed(WithLinear):
    def prepare(self) -> None:
        self.inner = nn.LayerNorm(WIDTH)


class BatchNormed(WithLinear):
    def prepare(self) -> None:
        self.inner = nn.BatchNorm1D(WIDTH)


class Added(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return h + self.number


class Scaled(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return h * self.number


class Dropped(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return functional.dropout(h, 0.3, training=self.training)


class Mixed(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return functional.softmax(h @ h.t()) @ h


class InputAdded(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return h + x


class Halves(Block):
    def forward(self, h: Any, x: Any) -> Any:
        left, right = paddle.split(h, 2, axis=1)
        return paddle.concat([right * 2, left], axis=1)


class Convolved(Block):
    def prepare(self) -> None:
        self.inner = nn.Conv1D(1, 1, 3, padding=1)

    def forward(self, h: Any, x: Any) -> Any:
        return self.inner(h.unsqueeze(1)).squeeze(1)


class Recurrent(Block):
    def prepare(self) -> None:
        self.inner = nn.GRU(WIDTH, WIDTH)

    def forward(self, h: Any, x: Any) -> Any:
        return self.inner(paddle.stack([h, h * self.number], axis=1))[0][:, -1]


class BranchOnNumber(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return h * 2 if self.number > 0 else functional.relu(h)


class BranchInProgram(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return paddle.where(h.mean() > 0, h * 2, functional.relu(h))


class Hooked(WithLinear):
    def prepare(self) -> None:
        super().prepare()
        self.inner.register_forward_post_hook(lambda layer, inputs, output: output * 2)


class Constants(Block):
    def prepare(self) -> None:
        self.register_buffer("places", paddle.arange(WIDTH), persistable=self.number > 0)
        self.mask = paddle.tril(paddle.ones([WIDTH, WIDTH]))

    def forward(self, h: Any, x: Any) -> Any:
        return paddle.matmul(h, self.mask) + self.places.astype("float32")


class BufferAssigned(Block):
    def prepare(self) -> None:
        self.register_buffer("mean", paddle.zeros([WIDTH]), persistable=self.number > 0)

    def forward(self, h: Any, x: Any) -> Any:
        self.mean = self.mean * 0.9 + h.detach().mean(axis=0) * 0.1
        return h - self.mean


class BufferWritten(BufferAssigned):
    def forward(self, h: Any, x: Any) -> Any:
        paddle.assign(self.mean * 0.9 + h.detach().mean(axis=0) * 0.1, self.mean)
        return h - self.mean


class Detached(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return h + h.detach() * 2


class WithoutGradient(Block):
    def forward(self, h: Any, x: Any) -> Any:
        with paddle.no_grad():
            fixed = paddle.tanh(h)
        return h * fixed


class Stopped(Block):
    def forward(self, h: Any, x: Any) -> Any:
        other = paddle.tanh(h)
        other.stop_gradient = True
        return h + other


class Frozen(WithLinear):
    def prepare(self) -> None:
        super().prepare()
        self.inner.weight.stop_gradient = True

    def forward(self, h: Any, x: Any) -> Any:
        return paddle.tanh(self.inner(h))


class Gated(Block):
    """Zero at first."""

    def prepare(self) -> None:
        zero = nn.initializer.Constant(0.0)
        self.gate = self.create_parameter([1], default_initializer=zero)

    def forward(self, h: Any, x: Any) -> Any:
        return self.gate * h


class Noting(Block):
    """The loss adds ``note``, as that of a mixture of experts does."""

    def prepare(self) -> None:
        self.note: Any = None

    def forward(self, h: Any, x: Any) -> Any:
        self.note = h.square().mean()
        return h * self.number


# ------------------------------------------------------------------------ what Paddle may get wrong


class ColumnWritten(Block):
    def forward(self, h: Any, x: Any) -> Any:
        h = h * 1.0
        h[:, :1] = self.number
        return h


class RowWritten(Block):
    def forward(self, h: Any, x: Any) -> Any:
        h = h * 1.0
        h[0] = 0.0
        return h


class RowWrittenInABranch(Block):
    """The branch that is taken has no gradient where it is wrong in the other."""

    def forward(self, h: Any, x: Any) -> Any:
        h = h * 1.0
        h[0] = 0.0
        return paddle.where(h.mean() > 100, h * 2, functional.relu(h))


class WrittenIntoZeros(Block):
    def forward(self, h: Any, x: Any) -> Any:
        fixed = paddle.zeros([x.shape[0], WIDTH])
        fixed[:, 0] = h[:, 1]
        return h + fixed


class MaskWritten(Block):
    """What is written to needs no gradient. Paddle 2.6 refuses it too."""

    def forward(self, h: Any, x: Any) -> Any:
        mask = paddle.ones([x.shape[0], WIDTH])
        mask[:, 0] = 0.5
        mask[0] = x[0].sum()
        return h * mask


class PartsWritten(Block):
    def forward(self, h: Any, x: Any) -> Any:
        before = paddle.tanh(h) * 1.0
        before[:, :2] = before[:, 2:] * 2
        return before * h


class InputRowWritten(WithLinear):
    def forward(self, h: Any, x: Any) -> Any:
        h = self.inner(h)
        h[-1] = x[0]
        return h


class EarlyReturn(Block):
    def forward(self, h: Any, x: Any) -> Any:
        if h.mean() > 0:
            return h * 2
        return functional.relu(h)


class BothBranches(WithLinear):
    def forward(self, h: Any, x: Any) -> Any:
        if h.mean() > 0:
            h = self.inner(h)
            h = h + 1
        else:
            h = h * 0.5
        return h


class Counting(Block):
    def prepare(self) -> None:
        self.calls = 0

    def forward(self, h: Any, x: Any) -> Any:
        self.calls += 1
        return h / self.calls


class Remembering(Block):
    """Its second step reads an attribute of the first."""

    def prepare(self) -> None:
        self.last: Any = None

    def forward(self, h: Any, x: Any) -> Any:
        out = h if self.last is None else h + self.last
        self.last = h.detach().mean(axis=0)
        return out


class Listing(Block):
    def prepare(self) -> None:
        self.seen: list[Any] = []

    def forward(self, h: Any, x: Any) -> Any:
        self.seen.append(h.detach().mean())
        return h + self.seen[0]


class Caching(Block):
    def prepare(self) -> None:
        self.cache: dict[str, Any] = {}

    def forward(self, h: Any, x: Any) -> Any:
        self.cache["h"] = h.detach()
        return h * 1.5


class WeightNormed(WithLinear):
    def prepare(self) -> None:
        self.inner = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


class SpectralNormed(WithLinear):
    def prepare(self) -> None:
        self.inner = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class SpectralLayer(WithLinear):
    def prepare(self) -> None:
        super().prepare()
        self.spectral = nn.SpectralNorm([WIDTH, WIDTH], power_iters=1)

    def forward(self, h: Any, x: Any) -> Any:
        return h @ self.spectral(self.inner.weight)


class GradientHooked(Block):
    def forward(self, h: Any, x: Any) -> Any:
        h = h * 1.0
        h.register_hook(lambda gradient: gradient * 3)
        return h


class BufferSet(BufferAssigned):
    def forward(self, h: Any, x: Any) -> Any:
        self.mean.set_value(self.mean * 0.9 + h.detach().mean(axis=0) * 0.1)
        return h - self.mean


class BufferElementWritten(BufferAssigned):
    def forward(self, h: Any, x: Any) -> Any:
        self.mean[0] = self.mean[0] + 1.0
        return h - self.mean


class BufferAddedTo(BufferAssigned):
    def forward(self, h: Any, x: Any) -> Any:
        self.mean.add_(h.detach().mean(axis=0))
        return h - self.mean


class PlainTensor(Block):
    """A tensor kept in a plain attribute, which a Program forgets."""

    def prepare(self) -> None:
        self.mean = paddle.zeros([WIDTH])

    def forward(self, h: Any, x: Any) -> Any:
        out, self.mean = h - self.mean, h.detach().mean(axis=0)
        return out


class AddInPlace(Block):
    def forward(self, h: Any, x: Any) -> Any:
        h = h * 1.0
        h.add_(paddle.tanh(h) * self.number)
        return h


class ScaleInPlace(Block):
    def forward(self, h: Any, x: Any) -> Any:
        h = h * 1.0
        h.scale_(0.5)
        return h


class ReluInPlace(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return functional.relu_(h * 1.0)


class ClipInPlace(Block):
    def forward(self, h: Any, x: Any) -> Any:
        h = h * 1.0
        h.clip_(-0.5, 0.5)
        return h


class Assigned(Block):
    def forward(self, h: Any, x: Any) -> Any:
        y = h * 1.0
        paddle.assign(paddle.tanh(h), y)
        return h + y


class Triple(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, h: Any) -> Any:
        return h * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 3


class WithPyLayer(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return Triple.apply(h)


class DrawsFromNumPy(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return h * float(np.random.rand())


class DrawsFromPython(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return h * (1.0 + random.random())


class SetsSeed(Block):
    def forward(self, h: Any, x: Any) -> Any:
        paddle.seed(5)
        return functional.dropout(h, 0.3)


class ReadsShape(Block):
    def forward(self, h: Any, x: Any) -> Any:
        return h / h.shape[0]


class Reshaped(Block):
    def forward(self, h: Any, x: Any) -> Any:
        rows = x.shape[0]
        return h.reshape([rows * 2, 2]).sum(1).reshape([rows, 2]).tile([1, 2])


class ArgumentWritten(Block):
    def forward(self, h: Any, x: Any) -> Any:
        if x.stop_gradient:
            x[0] = 0.25
        return h + x


ORDINARY: list[type[Block]] = [
    Dense, LayerNormed, BatchNormed, Added, Scaled, Dropped, Mixed, InputAdded, Halves, Convolved,
    Recurrent, BranchOnNumber, BranchInProgram, Constants, BufferAssigned, BufferWritten, Noting,
    Detached, Frozen, WithoutGradient, Stopped, Hooked, Gated,
]  # fmt: skip
ODD: list[type[Block]] = [
    ColumnWritten, RowWritten, PartsWritten, InputRowWritten, EarlyReturn, BothBranches, Counting,
    Remembering, Listing, Caching, WeightNormed, SpectralNormed, SpectralLayer, GradientHooked,
    BufferSet, BufferElementWritten, BufferAddedTo, PlainTensor, AddInPlace, ScaleInPlace,
    ReluInPlace, ClipInPlace, Assigned, WithPyLayer, DrawsFromNumPy, DrawsFromPython, SetsSeed,
    ReadsShape, Reshaped, ArgumentWritten,
]  # fmt: skip


class Small(nn.Layer):
    """One block between a Linear and a Linear; `kind` is what a test is about."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.block = kind()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.head(self.block(self.entry(x * 1.0), x))  # x may be written to


class RandomModel(nn.Layer):
    """Random blocks between a Linear and a Linear; most have one odd block or none.

    Args:
        drawn: Which blocks.
        most_ordinary: How many ordinary blocks at most.
    """

    def __init__(self, drawn: random.Random, most_ordinary: int) -> None:
        super().__init__()
        kinds = [drawn.choice(ORDINARY) for _ in range(drawn.randint(1, most_ordinary))]
        for _ in range(drawn.choice([0, 0, 1, 1, 2])):
            kinds.insert(drawn.randint(0, len(kinds)), drawn.choice(ODD))
        blocks: list[nn.Layer] = [one(drawn.choice([-0.5, 0.5, 2.0])) for one in kinds]
        if drawn.random() < 0.3:  # one Layer, called twice
            blocks.insert(drawn.randint(0, len(blocks)), drawn.choice(blocks))
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.LayerList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.adds = drawn.random() < 0.4
        self.description = " ".join(type(one).__name__ for one in blocks)

    def forward(self, x: Any, factor: Any = 1) -> Any:
        h = self.entry(x * 1.0)
        for block in self.blocks:
            h = h + block(h, x) if self.adds else block(h, x)
        return self.head(h) * factor

    def notes(self) -> Any:
        """What the loss adds for the blocks that have kept something for it."""
        return sum(0.1 * one.note for one in self.blocks if isinstance(one, Noting))
