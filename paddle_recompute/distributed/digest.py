"""Digests of the bits of tensors, each computed where its tensor is."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute._paddle import device, released_memory

_PIECE = 2**18
"""Elements; two copies of a piece in int64 are all the memory that a digest takes."""
_FORMS = {1: "int8", 2: "int16"}
"""By bytes of an element. Larger elements are taken as several int32: the sign bit of an int64
would be the highest bit of the sum, where any two differences cancel.
"""
_FACTOR = 0x9E3779B97F4A7C15


class Digests:
    """A number for each tensor, equal for equal bits, different for others but by chance (1 in
    2**32).

    Bits are compared, so a NaN equals itself, and 0.0 is not -0.0. On a device, this puts five
    kernels for each 2**18 elements on the stream, and the host waits in `values` only.

    Args:
        tensors: Of any dtypes and places; or arrays. Of an offloaded parameter, the values in its
            slot count.
    """

    def __init__(self, tensors: Iterable[paddle.Tensor | NDArray[Any]]) -> None:
        weights: dict[str, paddle.Tensor] = {}
        self._sums = [_sums_of(tensor, weights) for tensor in tensors]

    @functools.cached_property
    def values(self) -> list[int]:
        """The numbers, below 2**64."""
        return [
            functools.reduce(
                lambda value, one: (value * _FACTOR + one) % 2**64, np.asarray(sums).tolist(), 0
            )
            for sums in self._sums
        ]


@paddle.no_grad()
def _sums_of(tensor: paddle.Tensor | NDArray[Any], weights: dict[str, paddle.Tensor]) -> Any:
    if not isinstance(tensor, np.ndarray) and not _is_on_device(tensor):
        tensor = tensor.numpy()
    if isinstance(tensor, np.ndarray):
        array = np.ravel(tensor)
        bits = array.view(_FORMS.get(array.itemsize, "int32"))
        return [(part * _weights()[: part.size]).sum() for part in _pieces(bits)]
    place = str(tensor.place)
    if place not in weights:
        weights[place] = paddle.to_tensor(_weights(), place=tensor.place)
    bits = device.bits_of(tensor, _FORMS.get(tensor.element_size(), "int32"))
    sums = [
        (part.astype("int64") * weights[place][: part.shape[0]]).sum() for part in _pieces(bits)
    ]
    return paddle.stack(sums) if sums else []


def _is_on_device(tensor: paddle.Tensor) -> bool:
    return released_memory.has_memory(tensor) and device.can_view_bits(tensor)


def _pieces(bits: Any) -> Iterator[Any]:
    return (bits[begin : begin + _PIECE] for begin in range(0, bits.shape[0], _PIECE))


@functools.cache
def _weights() -> NDArray[np.int64]:
    """Odd pseudo-random numbers, the same on all ranks (splitmix64)."""
    mixed = np.arange(1, _PIECE + 1, dtype="uint64") * np.uint64(_FACTOR)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)
    return odd.view(np.int64)
