"""Operators of an encoder in bitwise identical forms that take Paddle less time on a CPU.

Paddle's CPU kernels (2.6, 3.x) draw the numbers of a dropout mask as floats, and add a broadcast
mask element by element. In dygraph, on float32 tensors of a CPU and without AMP, the forms here do
the same arithmetic in the same order. Elsewhere, so in a Program, and for small tensors they are
Paddle's own calls. A form can go when Paddle's kernel is as fast.

A PyLayer here has one tensor that needs a gradient: ``paddle.grad`` that asks for one of two ends
in an error of Paddle's, so a bias keeps Paddle's gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from paddle_recompute._paddle.amp import OFF, amp_state
from paddle_recompute._paddle.version import is_dygraph

SMALLEST = 2**16
"""Elements. With fewer, the Python of a form takes longer than it saves."""


def use_cpu_forms(model: paddle.nn.Layer) -> None:
    """Give each Dropout and MultiHeadAttention of `model`, none of a subclass, its form."""
    for layer in model.sublayers(include_self=True):
        layer.__class__ = FORMS.get(type(layer), type(layer))


class Dropout(paddle.nn.Dropout):
    """Paddle's, by `dropout`."""

    def forward(self, input: paddle.Tensor) -> paddle.Tensor:
        """As Paddle's."""
        if self.training and self.axis is None and self.mode == "upscale_in_train":
            return dropout(input, self.p)
        return paddle.nn.Dropout.forward(self, input)


class MultiHeadAttention(paddle.nn.MultiHeadAttention):
    """Paddle's, with the mask expanded before it is added, and `dropout`."""

    def forward(
        self,
        query: paddle.Tensor,
        key: paddle.Tensor | None = None,
        value: paddle.Tensor | None = None,
        attn_mask: paddle.Tensor | None = None,
        cache: Any = None,
    ) -> Any:
        """As Paddle's."""
        if cache is not None or self.need_weights or not _is_on(query) or not _is_float(attn_mask):
            forward = paddle.nn.MultiHeadAttention.forward  # to_static of 2.6 has no bare super()
            return forward(self, query, key, value, attn_mask, cache)
        q, k, v = self._prepare_qkv(
            query, query if key is None else key, query if value is None else value, None
        )
        scores = paddle.matmul(q * (self.head_dim**-0.5), k, transpose_y=True)
        if attn_mask is not None:
            scores = add_mask(scores, attn_mask)
        weights = F.softmax(scores)
        if self.dropout and self.training:
            weights = dropout(weights, self.dropout)
        out = paddle.matmul(weights, v).transpose([0, 2, 1, 3])
        return self.out_proj(out.reshape([0, 0, out.shape[2] * out.shape[3]]))


FORMS = {
    paddle.nn.Dropout: Dropout,
    paddle.nn.MultiHeadAttention: MultiHeadAttention,
}


def dropout(x: paddle.Tensor, p: float) -> paddle.Tensor:
    """``F.dropout(x, p)`` in training, from one integer for each element.

    Mask and state of the generator afterwards are Paddle's. With 2.6.2 one element in 10^10 or so
    is not: its C++ library divides by nearly a power of two and does not take the first bits.
    """
    bits, smallest = _kept_draws(float(p))
    if not bits or not _is_on(x):
        return F.dropout(x, p)
    keep = paddle.randint(0, 2**bits, x.shape, dtype="int32") >= smallest
    share = float(np.float32(1) - np.float32(p))
    return _Masked.apply(x, keep, share, False)


def add_mask(scores: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
    """``scores + mask``, of float32; a `mask` that needs a gradient is added as Paddle adds it."""
    return scores + (mask.expand(scores.shape) if mask.stop_gradient else mask)


@paddle.jit.not_to_static
def _is_on(x: paddle.Tensor) -> bool:
    return (
        is_dygraph()
        and x.dtype == paddle.float32
        and x.place.is_cpu_place()
        and x.size >= SMALLEST
        and amp_state() is OFF
    )


def _is_float(mask: paddle.Tensor | None) -> bool:
    return mask is None or mask.dtype == paddle.float32


@functools.cache
def _kept_draws(p: float) -> tuple[int, int]:
    """The number of bits b to draw for a dropout of `p`, and the smallest integer that keeps.

    Paddle rounds a draw u of 64 bits to a float32 and keeps where ``u / 2**64 >= p``; so from the
    middle of `p` and the float32 below it. That is a multiple of ``2**-b``, and the integer is the
    first b bits of u. (0, 0): more than 30 bits are needed, or nothing is random.
    """
    of = np.float32(p)
    if not 0 < of < 1:
        return 0, 0
    middle = (float(of) + float(np.nextafter(of, np.float32(0)))) / 2
    numerator, denominator = middle.as_integer_ratio()
    bits = denominator.bit_length() - 1
    return (bits, numerator) if bits <= 30 else (0, 0)


class _Masked(PyLayer):  # type: ignore[misc, unused-ignore]
    """``x / share`` where `keep` is true, else 0: negative for a gradient that is, as Paddle's."""

    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, keep: paddle.Tensor, share: float, is_gradient: bool
    ) -> paddle.Tensor:
        ctx.save_for_backward(keep)
        ctx.share = share
        y = keep.astype(x.dtype)
        y.multiply_(x)
        y.divide_(paddle.full_like(y, share))  # of a number, 2.6.2 takes the reciprocal
        return y if is_gradient else y.scale_()  # which adds 0 and makes zeros positive

    @staticmethod
    def backward(ctx: Any, dy: paddle.Tensor) -> tuple[paddle.Tensor, None]:
        (keep,) = ctx.saved_tensor()
        return _Masked.apply(dy, keep, ctx.share, True), None
