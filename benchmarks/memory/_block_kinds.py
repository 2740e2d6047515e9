"""Kinds of blocks of large models, for `recompute_cost`: a chain of two, and its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import paddle
from paddle import nn
from paddle.nn import functional as F

BLOCKS, ROWS, LENGTH = 2, 2, 64


class RMSNorm(nn.Layer):
    """``x / sqrt(mean(x^2))``, times a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = self.create_parameter([width], default_initializer=nn.initializer.Constant(1))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x * paddle.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaBlock(nn.Layer):
    """LLaMA's: RMSNorm, rotary positions, causal attention, SwiGLU; no dropout, no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        inner = width * 8 // 3
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias_attr=False)
        self.out = nn.Linear(width, width, bias_attr=False)
        self.gate = nn.Linear(width, inner, bias_attr=False)
        self.up = nn.Linear(width, inner, bias_attr=False)
        self.down = nn.Linear(inner, width, bias_attr=False)
        self._heads, self._size = heads, width // heads
        angles = paddle.arange(LENGTH).astype("float32").unsqueeze(1) / (
            10000.0 ** (paddle.arange(0, self._size, 2).astype("float32") / self._size)
        )
        self._cos, self._sin = paddle.cos(angles), paddle.sin(angles)
        self._mask = paddle.triu(paddle.full([LENGTH, LENGTH], -1e9), 1)

    def _rotated(self, x: paddle.Tensor) -> paddle.Tensor:
        one, other = x.chunk(2, -1)
        return paddle.concat(
            [one * self._cos - other * self._sin, other * self._cos + one * self._sin], -1
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        """``[rows, LENGTH, width]``, float32, as `x` is."""
        mixed = self.qkv(self.norm1(x)).reshape([0, 0, 3, self._heads, self._size])
        q, k, v = mixed.transpose([2, 0, 3, 1, 4]).unbind(0)
        scores = paddle.matmul(self._rotated(q), self._rotated(k), transpose_y=True)
        shares = F.softmax(scores * self._size**-0.5 + self._mask)
        heads = paddle.matmul(shares, v).transpose([0, 2, 1, 3]).reshape(x.shape)
        x = x + self.out(heads)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def transformer(*, dropout: float, is_pre_norm: bool) -> nn.Layer:
    """Paddle's own, of the width of BERT-base and GPT-2."""
    return nn.TransformerEncoderLayer(
        768, 12, 3072, dropout=dropout, activation="gelu", normalize_before=is_pre_norm
    )


@dataclass(frozen=True)
class Kind:
    """A block, the shape of its input, and the pattern of a last product: nothing is saved after
    it.
    """

    block: Callable[[], nn.Layer]
    shape: tuple[int, ...]
    last: str = ""

    def model(self) -> nn.Layer:
        """A fresh chain, the same each time."""
        paddle.seed(0)
        return Chain([self.block() for _ in range(BLOCKS)])


class Chain(nn.Layer):
    """Blocks one after the other, named as those of an encoder."""

    def __init__(self, blocks: list[nn.Layer]) -> None:
        super().__init__()
        self.layers = nn.LayerList(blocks)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


KINDS = {
    "post-norm, dropout 0.1, hidden 768 (ERNIE)": Kind(
        lambda: transformer(dropout=0.1, is_pre_norm=False), (ROWS, LENGTH, 768)
    ),
    "pre-norm, no dropout, hidden 768 (GPT)": Kind(
        lambda: transformer(dropout=0.0, is_pre_norm=True), (ROWS, LENGTH, 768), "layers.*.linear2"
    ),
    "RMSNorm, SwiGLU, hidden 1024 (LLaMA)": Kind(
        lambda: LlamaBlock(1024, 16), (ROWS, LENGTH, 1024), "layers.*.down"
    ),
    "bottleneck of 3 convolutions, 256 channels (ResNet)": Kind(
        lambda: paddle.vision.models.resnet.BottleneckBlock(256, 64, norm_layer=nn.BatchNorm2D),
        (4, 256, 28, 28),
    ),
}
