"""Many tensors as one flat one, and back, with few calls of Python for each of them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Any

import paddle
from paddle.base import core

_Tensor: Any = core.eager.Tensor
_all_done = deque[Any](maxlen=0).extend
gradient_of = attrgetter("grad")
is_frozen = attrgetter("stop_gradient")
"""With ``map`` they read ``.grad`` and ``stop_gradient`` of many without a call of Python."""


def joined(tensors: Sequence[paddle.Tensor], shells: list[paddle.Tensor]) -> paddle.Tensor:
    """The elements of `tensors`, one after the other, in a flat tensor of its own.

    Paddle joins flat tensors only. ``_share_buffer_to`` (2.6, 3.x), which Paddle's own sharding
    uses, gives a flat tensor the memory of another in a tenth of the time of ``reshape``. Can go
    when ``paddle.concat`` flattens.

    Args:
        tensors: All of one dtype.
        shells: An empty list the first time, and that list for as many elements each from then on.
            It holds flat tensors that keep no memory.
    """
    if not all(map(_Tensor.is_contiguous, tensors)):
        return paddle._C_ops.concat([*map(paddle._C_ops.reshape, tensors, repeat([-1]))], 0)
    if shells:
        _all_done(map(_Tensor._share_buffer_to, tensors, shells))
    else:
        shells += map(paddle._C_ops.reshape, tensors, repeat([-1]))
    flat = paddle._C_ops.concat(shells, 0)
    _all_done(map(_nothing(flat.dtype)._share_buffer_to, shells))
    return flat


def parted(flat: paddle.Tensor, sizes: Sequence[int]) -> list[paddle.Tensor]:
    """Flat tensors of `sizes` elements, in memory of their own: ``paddle.split``, which would look
    at each of them in Python.
    """
    return list(paddle._C_ops.split(flat, sizes, 0))


@functools.cache
def _nothing(dtype: Any) -> paddle.Tensor:
    return paddle.empty([1], dtype)


def are_sparse(tensors: Iterable[paddle.Tensor]) -> bool:
    """Whether one of `tensors` is a SelectedRows."""
    return any(map(_Tensor.is_selected_rows, tensors))


Gradients = Mapping[Any, Sequence[paddle.Tensor]]
"""Tensors by their dtypes."""


def by_dtype(tensors: Sequence[paddle.Tensor]) -> Gradients:
    """Those of `tensors` of each dtype; of those in one memory, as a PyLayer's backward makes them
    that returns a gradient for two parameters (``return g, g``), the largest alone.
    """
    addresses = [*map(_Tensor.data_ptr, tensors)]
    if len({*addresses}) < len(addresses):
        ordered = sorted(zip(addresses, tensors, strict=True), key=lambda one: one[1].size)
        tensors = [*dict(ordered).values()]
    dtypes = [*map(attrgetter("dtype"), tensors)]
    if dtypes and _are_equal(dtypes):  # without a hash of each
        return {dtypes[0]: tensors}
    return {dtype: [*compress(tensors, map(dtype.__eq__, dtypes))] for dtype in {*dtypes}}


def _are_equal(dtypes: Sequence[Any]) -> bool:
    """The same objects on 3.x; on 2.6 always others, whose ``==`` is slow."""
    return all(map(is_, dtypes, repeat(dtypes[0]))) or len({*map(int, dtypes)}) == 1


def squares_of(tensors: Sequence[paddle.Tensor]) -> list[paddle.Tensor]:
    """The sum of the squares of each of `tensors`, ``[1]``.

    ``_C_ops.squared_l2_norm`` (2.6, 3.x) is what ``paddle.nn.ClipGradByGlobalNorm`` calls: one
    kernel, on a CPU with the bits of ``square().sum()``. Can go when it has a public name.
    """
    return [*map(paddle._C_ops.squared_l2_norm, tensors)]


def multiply_all(tensors: Sequence[paddle.Tensor], factor: paddle.Tensor) -> None:
    """Multiply each of `tensors` in place by `factor`, one number of their dtype.

    ``_C_ops.multiply_`` (2.6, 3.x) is what ``tensor.multiply_(factor)`` calls.
    """
    _all_done(map(paddle._C_ops.multiply_, tensors, repeat(factor)))


def scale_all(tensors: Sequence[paddle.Tensor], factor: float) -> None:
    """Multiply each of `tensors` in place by `factor`: what ``tensor.scale_(factor)`` calls."""
    _all_done(map(paddle._C_ops.scale_, tensors, repeat(factor), repeat(0.0), repeat(True)))


def versions_of(tensors: Sequence[paddle.Tensor]) -> tuple[list[int], list[int]]:
    """The addresses of `tensors`, and the ``inplace_version`` of each."""
    return [*map(_Tensor.data_ptr, tensors)], [*map(_Tensor._inplace_version, tensors)]


def replace_memory(tensors: Sequence[paddle.Tensor], pieces: Sequence[paddle.Tensor]) -> None:
    """Let each of `tensors` have the elements of its piece, without a copy where that is possible.

    ``_share_buffer_to`` keeps the shape and the strides, so a tensor that is not contiguous is
    written to. Can go when Paddle copies into a list of tensors in one call.

    Args:
        tensors: Whose elements are replaced.
        pieces: Contiguous, with as many elements as the tensor, of any shape.
    """
    if all(map(_Tensor.is_contiguous, tensors)):
        _all_done(map(_Tensor._share_buffer_to, pieces, tensors))
        _all_done(map(_Tensor._bump_inplace_version, tensors))
        return
    for tensor, piece in zip(tensors, pieces, strict=True):
        paddle.assign(piece.reshape(tensor.shape), tensor)
