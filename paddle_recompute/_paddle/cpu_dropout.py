"""Dropout in a bitwise identical form that takes Paddle less time on a CPU.

Paddle's CPU kernel (2.6, 3.x) draws a float for each element. In dygraph, on float32 tensors of a
CPU and without AMP, the form here draws an integer. Elsewhere, so in a Program, and for small
tensors it is Paddle's own call. It can go when Paddle's kernel is as fast.

Paddle 2.6 keeps its own: its C++ library divides by nearly a power of two where the newer one takes
the first bits, so about one element of a mask in 10^10 would be another one.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from paddle_recompute._paddle.amp import OFF, amp_state
from paddle_recompute._paddle.version import is_dygraph, paddle_version

SMALLEST = 2**16
"""Elements. With fewer, the Python of the form takes longer than it saves."""


def use_fast_dropout(model: paddle.nn.Layer) -> None:
    """Give each Dropout of `model`, none of a subclass, the form for CPUs."""
    for layer in model.sublayers(include_self=True):
        if type(layer) is paddle.nn.Dropout:
            layer.__class__ = Dropout


class Dropout(paddle.nn.Dropout):
    """Paddle's, by `dropout`."""

    def forward(self, input: paddle.Tensor) -> paddle.Tensor:
        """As Paddle's."""
        if self.training and self.axis is None and self.mode == "upscale_in_train":
            return dropout(input, self.p)
        return paddle.nn.Dropout.forward(self, input)


def dropout(x: paddle.Tensor, p: float) -> paddle.Tensor:
    """``F.dropout(x, p)`` in training, from one integer for each element.

    Mask and state of the generator afterwards are Paddle's.
    """
    bits, smallest = _kept_draws(float(p))
    if not bits or not _is_on(x):
        return F.dropout(x, p)
    keep = paddle.randint(0, 2**bits, x.shape, dtype="int32") >= smallest
    share = float(np.float32(1) - np.float32(p))
    return _Masked.apply(x, keep, share, False)


@paddle.jit.not_to_static
def _is_on(x: paddle.Tensor) -> bool:
    return (
        is_dygraph()
        and x.dtype == paddle.float32
        and x.place.is_cpu_place()
        and x.size >= SMALLEST
        and amp_state() is OFF
        and paddle_version() >= (3, 0, 0)
    )


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
