"""Random models for `StaticTrainStep`; each block is one thing that people write in a forward."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional

HIDDEN, FEATURES = 6, 4


class Block(nn.Layer):
    """``[rows, HIDDEN]`` to ``[rows, HIDDEN]``; `number` varies what a block does."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number
        self.prepare()

    def prepare(self) -> None:
        pass


class Dense(Block):
    def prepare(self) -> None:
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, h: Any) -> Any:
        return functional.gelu(self.inner(h))


class LayerNormed(Block):
    def prepare(self) -> None:
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, h: Any) -> Any:
        return self.norm(h)


class BatchNormed(Block):
    def prepare(self) -> None:
        self.norm = nn.BatchNorm1D(HIDDEN)

    def forward(self, h: Any) -> Any:
        return self.norm(h)


class Added(Block):
    def forward(self, h: Any) -> Any:
        return h + self.number


class Dropped(Block):
    def forward(self, h: Any) -> Any:
        return functional.dropout(h, 0.3, training=self.training)


class Convolved(Block):
    def prepare(self) -> None:
        self.inner = nn.Conv1D(1, 1, 3, padding=1)

    def forward(self, h: Any) -> Any:
        return self.inner(h.unsqueeze(1)).squeeze(1)


class Recurrent(Block):
    def prepare(self) -> None:
        self.inner = nn.GRU(HIDDEN, HIDDEN)

    def forward(self, h: Any) -> Any:
        return self.inner(paddle.stack([h, h * self.number], axis=1))[0][:, -1]


class ColumnWritten(Block):
    def forward(self, h: Any) -> Any:
        h = h * 1.0
        h[:, :1] = self.number
        return h


class RowWritten(Block):
    def forward(self, h: Any) -> Any:
        h = h * 1.0
        h[0] = 0.0
        return h


class PartsWritten(Block):
    def forward(self, h: Any) -> Any:
        before = paddle.tanh(h)
        before[:, 1:3] = before[:, 3:5] * 2
        return before * h


class EarlyReturn(Block):
    def forward(self, h: Any) -> Any:
        if h.mean() > 0:
            return h * 2
        return functional.relu(h)


class BranchOnNumber(Block):
    def forward(self, h: Any) -> Any:
        return h * 2 if self.number > 0 else functional.relu(h)


class BranchInProgram(Block):
    def forward(self, h: Any) -> Any:
        return paddle.where(h.mean() > 0, h * 2, functional.relu(h))


class Counting(Block):
    def prepare(self) -> None:
        self.calls = 0

    def forward(self, h: Any) -> Any:
        self.calls += 1
        return h / self.calls


class Remembering(Block):
    def prepare(self) -> None:
        self.last: Any = None

    def forward(self, h: Any) -> Any:
        out = h if self.last is None else h + self.last
        self.last = h.detach().mean(axis=0)
        return out


class Noting(Block):
    def prepare(self) -> None:
        self.note: Any = None

    def forward(self, h: Any) -> Any:
        self.note = h.square().mean()
        return h * self.number


class Listing(Block):
    def prepare(self) -> None:
        self.seen: list[Any] = []

    def forward(self, h: Any) -> Any:
        self.seen.append(h.detach().mean())
        return h + self.seen[0]


class WeightNormed(Block):
    def prepare(self) -> None:
        self.inner = nn.utils.weight_norm(nn.Linear(HIDDEN, HIDDEN))

    def forward(self, h: Any) -> Any:
        return self.inner(h)


class SpectralNormed(Block):
    def prepare(self) -> None:
        self.inner = nn.utils.spectral_norm(nn.Linear(HIDDEN, HIDDEN))

    def forward(self, h: Any) -> Any:
        return self.inner(h)


class Hooked(Block):
    def prepare(self) -> None:
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.inner.register_forward_post_hook(lambda layer, inputs, output: output * 2)

    def forward(self, h: Any) -> Any:
        return self.inner(h)


class GradientHooked(Block):
    def forward(self, h: Any) -> Any:
        h = h * 1.0
        h.register_hook(lambda gradient: gradient * 3)
        return h


class Constants(Block):
    def prepare(self) -> None:
        self.register_buffer("places", paddle.arange(HIDDEN), persistable=self.number > 0)
        self.mask = paddle.tril(paddle.ones([HIDDEN, HIDDEN]))

    def forward(self, h: Any) -> Any:
        return paddle.matmul(h, self.mask) + self.places.astype("float32")


class BufferAssigned(Block):
    def prepare(self) -> None:
        self.register_buffer("mean", paddle.zeros([HIDDEN]), persistable=self.number > 0)

    def forward(self, h: Any) -> Any:
        self.mean = self.mean * 0.9 + h.detach().mean(axis=0) * 0.1
        return h - self.mean


class BufferWritten(BufferAssigned):
    def forward(self, h: Any) -> Any:
        paddle.assign(self.mean * 0.9 + h.detach().mean(axis=0) * 0.1, self.mean)
        return h - self.mean


class BufferAddedTo(BufferAssigned):
    def forward(self, h: Any) -> Any:
        self.mean.add_(h.detach().mean(axis=0))
        return h - self.mean


class PlainTensor(Block):
    def prepare(self) -> None:
        self.mean = paddle.zeros([HIDDEN])

    def forward(self, h: Any) -> Any:
        out, self.mean = h - self.mean, h.detach().mean(axis=0)
        return out


class AddInPlace(Block):
    def forward(self, h: Any) -> Any:
        h = h * 1.0
        h.add_(paddle.tanh(h) * self.number)
        return h


class ScaleInPlace(Block):
    def forward(self, h: Any) -> Any:
        h = h * 1.0
        h.scale_(0.5)
        return h


class ReluInPlace(Block):
    def forward(self, h: Any) -> Any:
        return functional.relu_(h * 1.0)


class ClipInPlace(Block):
    def forward(self, h: Any) -> Any:
        h = h * 1.0
        h.clip_(-0.5, 0.5)
        return h


class Assigned(Block):
    def forward(self, h: Any) -> Any:
        y = h * 1.0
        paddle.assign(paddle.tanh(h), y)
        return h + y


class Detached(Block):
    def forward(self, h: Any) -> Any:
        return h + h.detach() * 2


class WithoutGradient(Block):
    def forward(self, h: Any) -> Any:
        with paddle.no_grad():
            fixed = paddle.tanh(h)
        return h * fixed


class Stopped(Block):
    def forward(self, h: Any) -> Any:
        other = paddle.tanh(h)
        other.stop_gradient = True
        return h + other


class Triple(paddle.autograd.PyLayer):
    @staticmethod
    def forward(ctx: Any, h: Any) -> Any:
        return h * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 3


class WithPyLayer(Block):
    def forward(self, h: Any) -> Any:
        return Triple.apply(h)


class DrawsFromNumPy(Block):
    def forward(self, h: Any) -> Any:
        return h * float(np.random.rand())


class SetsSeed(Block):
    def forward(self, h: Any) -> Any:
        paddle.seed(5)
        return functional.dropout(h, 0.3)


class ReadsShape(Block):
    def forward(self, h: Any) -> Any:
        return h / h.shape[0]


class Frozen(Block):
    def prepare(self) -> None:
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.inner.weight.stop_gradient = True

    def forward(self, h: Any) -> Any:
        return paddle.tanh(self.inner(h))


class Gated(Block):
    """Zero at first."""

    def prepare(self) -> None:
        zero = nn.initializer.Constant(0.0)
        self.gate = self.create_parameter([1], default_initializer=zero)

    def forward(self, h: Any) -> Any:
        return self.gate * h


ORDINARY: list[type[Block]] = [
    Dense, LayerNormed, BatchNormed, Added, Dropped, Convolved, Recurrent, BranchOnNumber,
    BranchInProgram, Constants, BufferAssigned, BufferWritten, Noting, Detached, Frozen,
    WithoutGradient, Stopped, Hooked, Gated,
]  # fmt: skip
ODD: list[type[Block]] = [
    ColumnWritten, RowWritten, PartsWritten, EarlyReturn, Counting, Remembering, Listing,
    WeightNormed, SpectralNormed, GradientHooked, BufferAddedTo, PlainTensor, AddInPlace,
    ScaleInPlace, ReluInPlace, ClipInPlace, Assigned, WithPyLayer, DrawsFromNumPy, SetsSeed,
    ReadsShape,
]  # fmt: skip


class Model(nn.Layer):
    """Random blocks between a Linear and a Linear; most programs have one odd block or none.

    Args:
        seed: Which model.
    """

    names: ClassVar[str] = ""

    def __init__(self, seed: int) -> None:
        super().__init__()
        drawn = random.Random(seed)
        kinds = [drawn.choice(ORDINARY) for _ in range(drawn.randint(1, 4))]
        for _ in range(drawn.choice([0, 1, 1, 1, 2])):
            kinds.insert(drawn.randint(0, len(kinds)), drawn.choice(ODD))
        blocks: list[nn.Layer] = [one(drawn.choice([-0.5, 0.5, 2.0])) for one in kinds]
        if drawn.random() < 0.3:
            blocks.insert(drawn.randint(0, len(blocks)), drawn.choice(blocks))
        self.entry = nn.Linear(FEATURES, HIDDEN)
        self.blocks = nn.LayerList(blocks)
        self.head = nn.Linear(HIDDEN, 2)
        self.adds = drawn.random() < 0.4
        self.description = " ".join(type(one).__name__ for one in blocks)

    def forward(self, x: Any, factor: Any) -> Any:
        h = self.entry(x)
        for block in self.blocks:
            h = h + block(h) if self.adds else block(h)
        return self.head(h) * factor


def loss_of(model: Any, batch: dict[str, Any]) -> Any:
    """A mean over the rows, with an auxiliary loss that a block may have kept."""
    loss = (model(batch["x"], batch["factor"]) - batch["x"].sum(axis=1, keepdim=True)).square()
    loss = loss.mean()
    for block in model.blocks:
        if isinstance(block, Noting):
            loss = loss + 0.1 * block.note
    return loss
