"""Forms of Paddle's Layers that are fast on a CPU, and make the same bits.

Paddle's CPU kernels (2.6, 3.x) draw the numbers of a dropout mask slowly, add a broadcast mask
element by element, and copy a transposed view element by element. Here a mask is drawn as integers,
the mask of the scores is expanded first, and heads are split by a gather of rows. On another
device, in a Program, with another dtype and in mixed precision Paddle's own Layers run.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from numpy.typing import NDArray
from paddle.autograd import PyLayer

from paddle_recompute._paddle.amp import OFF, amp_state
from paddle_recompute._paddle.device import put

BITS = 30
"""Of a random number. An integer takes one number of the generator, like one of ``F.dropout``."""


def use_cpu_forms(model: paddle.nn.Layer) -> None:
    """Give the Dropout and MultiHeadAttention in `model`, but no subclass of them, these forms."""
    for layer in model.sublayers(include_self=True):
        form = _FORMS.get(type(layer))
        if form is not None:
            layer.__class__ = form


class Dropout(paddle.nn.Dropout):
    """Draws the masks of ``paddle.nn.Dropout`` faster."""

    def forward(self, input: paddle.Tensor) -> paddle.Tensor:
        """As ``paddle.nn.Dropout``."""
        if self.training and self.axis is None and self.mode == "upscale_in_train":
            return dropout(input, self.p)
        return super().forward(input)


class MultiHeadAttention(paddle.nn.MultiHeadAttention):
    """Makes no strided views, and adds no broadcast mask."""

    def forward(
        self,
        query: paddle.Tensor,
        key: paddle.Tensor | None = None,
        value: paddle.Tensor | None = None,
        attn_mask: paddle.Tensor | None = None,
        cache: Any = None,
    ) -> Any:
        """As ``paddle.nn.MultiHeadAttention``."""
        key = query if key is None else key
        value = query if value is None else value
        is_usual = (
            cache is None and not self.need_weights and all(map(_on_cpu, (query, key, value)))
        )
        if not is_usual or (attn_mask is not None and not _on_cpu(attn_mask)):
            return super().forward(query, key, value, attn_mask, cache)
        q = self._heads_first(self.q_proj(query))
        k = self._heads_first(self.k_proj(key))
        v = self._heads_first(self.v_proj(value))
        scores = paddle.matmul(q * (self.head_dim**-0.5), k, transpose_y=True)
        if attn_mask is not None:
            scores = scores + attn_mask.expand(scores.shape)
        weights = F.softmax(scores)
        if self.dropout and self.training:
            weights = dropout(weights, self.dropout)
        out = paddle.matmul(weights, v)
        batch, heads, length, size = out.shape
        out = _rows_of(out.reshape([-1, size]), batch, heads, length)
        return self.out_proj(out.reshape([batch, length, heads * size]))

    def _heads_first(self, x: paddle.Tensor) -> paddle.Tensor:
        """From ``[batch, length, heads * size]`` to ``[batch, heads, length, size]``."""
        batch, length, _ = x.shape
        rows = _rows_of(x.reshape([-1, self.head_dim]), batch, length, self.num_heads)
        return rows.reshape([batch, self.num_heads, length, self.head_dim])


_FORMS: dict[Any, Any] = {
    paddle.nn.Dropout: Dropout,
    paddle.nn.MultiHeadAttention: MultiHeadAttention,
}


def dropout(x: paddle.Tensor, p: float) -> paddle.Tensor:
    """``F.dropout(x, p)`` in training: the same masks, numbers, gradients and generator.

    Its second derivative is that of ``F.dropout``: 0 but for what flows through the gradient.
    """
    limit = _limit(p)
    if limit is None or not _on_cpu(x):
        return F.dropout(x, p)
    return _Dropout.apply(x, limit, np.float32(1) - np.float32(p))


@functools.cache
def _limit(p: float) -> int | None:
    """Random integers below it are dropped; None: `BITS` are too few to say so exactly.

    ``F.dropout`` drops where 64 random bits, rounded to a float32 in [0, 1), are below `p`: these
    are the bits below the middle between `p` and the float32 before it.
    """
    if not isinstance(p, float) or not 0 < p < 1:
        return None
    as_float = np.float32(p)
    middle = (float(as_float) + float(np.nextafter(as_float, np.float32(0)))) / 2 * 2**BITS
    return int(middle) if middle.is_integer() else None


class _Dropout(PyLayer):
    @staticmethod
    def forward(ctx: Any, x: paddle.Tensor, limit: int, share: np.float32) -> paddle.Tensor:
        numbers = paddle.randint(0, 2**BITS, x.shape, "int32")
        keep = paddle.greater_equal(numbers, paddle.full([1], limit, "int32"))
        ctx.save_for_backward(keep)
        ctx.share = share
        return _divided(paddle.where(keep, x, paddle.zeros_like(x)), share)

    @staticmethod
    def backward(ctx: Any, dy: paddle.Tensor) -> paddle.Tensor:
        (keep,) = ctx.saved_tensor()
        return _divided(dy * keep.astype(dy.dtype), ctx.share)


def _divided(kept: paddle.Tensor, share: np.float32) -> paddle.Tensor:
    """In place, by a tensor: 2.6 multiplies by the reciprocal of a number, and rounds otherwise."""
    return kept.divide_(paddle.full([1], float(share), kept.dtype))


def _on_cpu(x: paddle.Tensor) -> bool:
    return bool(
        paddle.in_dynamic_mode()
        and x.dtype == paddle.float32
        and x.place.is_cpu_place()
        and amp_state() is OFF
    )


def _rows_of(rows: paddle.Tensor, batch: int, first: int, second: int) -> paddle.Tensor:
    """Rows of ``[batch, first, second]`` in the order of ``[batch, second, first]``."""
    return paddle.gather(rows, put(_order(batch, first, second)))


@functools.lru_cache(maxsize=64)
def _order(batch: int, first: int, second: int) -> NDArray[np.int32]:
    numbers = np.arange(batch * first * second, dtype=np.int32).reshape(batch, first, second)
    return np.ascontiguousarray(numbers.transpose(0, 2, 1)).reshape(-1)
