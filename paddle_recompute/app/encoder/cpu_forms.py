"""Dropout and the bias of linear layers in forms that take Paddle less time on a CPU.

Paddle's CPU kernels (2.6, 3.x) draw a float for each element of a dropout mask, and sum the
gradient of a bias column by column. In dygraph, on float32 tensors of a CPU and without AMP, the
results of these forms are bitwise identical. Elsewhere, so in a Program, and for small tensors they
are Paddle's own calls. A form can go when Paddle's kernel is as fast.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.autograd import PyLayer

from paddle_recompute._paddle.amp import OFF, amp_state
from paddle_recompute._paddle.translation import in_sot
from paddle_recompute._paddle.version import is_dygraph, paddle_version

SMALLEST = 2**14
"""Elements. With fewer, the Python of a form takes longer than it saves."""


def use_cpu_forms(model: paddle.nn.Layer) -> None:
    """Give each Linear and Dropout of `model`, none of a subclass, the forward of its form.

    Its class stays: ``paddle.quantization``, ``paddle.flops`` and `to_static` go by that. Not on
    2.6, where `to_static` takes methods of Layers only, nor where the device is not the CPU.
    """
    if paddle_version() < (3, 0, 0) or paddle.get_device() != "cpu":
        return
    for layer in model.sublayers():
        if (form := _FORMS.get(type(layer))) is not None:
            layer.forward = _Bound(form, layer).forward


class _Bound:
    """``form.forward`` of `layer` as a method, which makes no cycle with `layer`."""

    def __init__(self, form: type[paddle.nn.Layer], layer: paddle.nn.Layer) -> None:
        self._form, self._layer = form, weakref.ref(layer)

    def forward(self, input: paddle.Tensor) -> paddle.Tensor:
        """As Paddle's. Where the Layer has got a class with another forward since, by that."""
        layer = self._layer()
        kind: Any = type(layer)
        form = self._form if kind.forward is _PADDLES[self._form] else kind
        return form.forward(layer, input)

    def __reduce__(self) -> tuple[Any, ...]:
        """The method of a copied or pickled Layer is that of the copy."""
        return _Bound, (self._form, self._layer())


class Linear(paddle.nn.Linear):
    """Paddle's, with the gradient of the bias summed row by row."""

    def forward(self, input: paddle.Tensor) -> paddle.Tensor:
        """As Paddle's."""
        if self.bias is None or self.bias.stop_gradient or not has_forms(input):
            return paddle.nn.Linear.forward(self, input)
        # An index of no number is the whole bias, here once for each row. Its gradient adds the
        # rows one by one, in Paddle's order. F.linear without a bias is matmul, 11 us later.
        whole = paddle.empty([*input.shape[:-1], 0], dtype="int32")
        return paddle.matmul(input, self.weight).add_(paddle.gather_nd(self.bias, whole))


class Dropout(paddle.nn.Dropout):
    """Paddle's, by `dropout`."""

    def forward(self, input: paddle.Tensor) -> paddle.Tensor:
        """As Paddle's."""
        if self.axis is None and self.mode == "upscale_in_train":
            return dropout(input, self.p, self.training)
        return paddle.nn.Dropout.forward(self, input)


_FORMS: dict[Any, Any] = {paddle.nn.Linear: Linear, paddle.nn.Dropout: Dropout}
_PADDLES = {form: kind.forward for kind, form in _FORMS.items()}


def dropout(x: paddle.Tensor, p: float, training: bool) -> paddle.Tensor:
    """``F.dropout(x, p, training=training)`` of finite `x`, from one integer for each element.

    A dropped inf or NaN is NaN here and 0 there: such a value shows in each step, not in some of
    them. ``where`` in place of the product has Paddle's zeros and takes longer.

    Paddle 2.6 keeps its own: its C++ library divides a draw by nearly a power of two where the
    newer one takes the first bits, so one element of a mask in 10^10 or so would be another one.
    Before 3.3 a division by a number is not Paddle's dropout's either.
    """
    if training and has_forms(x) and paddle_version() >= (3, 3):
        bits, smallest = _kept_draws(float(p))
        if bits:
            keep = paddle.randint(0, 2**bits, x.shape, dtype="int32") >= smallest
            share = float(np.float32(1) - np.float32(p))
            return _Masked.apply(x, keep.astype("uint8"), share, False)
    return F.dropout(x, p, training=training)


def has_forms(x: paddle.Tensor) -> bool:
    """Whether an operator of `x` has another form here; reads no tensor."""
    return not in_sot() and _has_forms(x)


@paddle.jit.not_to_static
def _has_forms(x: paddle.Tensor) -> bool:
    return (
        is_dygraph()
        and x.dtype == paddle.float32
        and x.place.is_cpu_place()
        and math.prod(x.shape) >= SMALLEST  # a fifth of the time of x.size
        and amp_state() is OFF
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
    """`x` divided by the kept `share` where `keep` is 1, else 0; `keep` alone is saved.

    Division by a Python number is correctly rounded, as the kernel of Paddle's dropout is (3.3).
    Not so ``divide`` of two tensors of one shape, by MKL's functions, nor division in 2.6.
    """

    @staticmethod
    def forward(
        ctx: Any, x: paddle.Tensor, keep: paddle.Tensor, share: float, is_gradient: bool
    ) -> paddle.Tensor:
        ctx.save_for_backward(keep)
        ctx.share = share
        y = (x / share).multiply_(keep.astype(x.dtype))
        return y if is_gradient else y.scale_(1.0)  # only a gradient has zeros with its signs

    @staticmethod
    def backward(ctx: Any, dy: paddle.Tensor) -> tuple[paddle.Tensor, None]:
        (keep,) = ctx.saved_tensor()
        return _Masked.apply(dy, keep, ctx.share, True), None
