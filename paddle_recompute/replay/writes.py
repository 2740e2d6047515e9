"""Which tensors were written to since a forward; no value is read to find out.

``Tensor.inplace_version`` counts in-place operators only: the kernels of optimizers,
``set_value``, ``set_state_dict``, ``copy_`` and ``assign`` of an array do not raise it (2.6.2,
3.3.1). If we raised it for them, plain backwards that Paddle allows today would fail. So these
writes are counted here, by address: each write advances a clock, and the last tick of each address
is kept.

Writes that bypass Paddle's Python API are not seen: ``get_tensor()``, DLPack, collectives, and
third-party operators that write to their inputs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import paddle

from paddle_recompute._paddle import layers, writes
from paddle_recompute._paddle.saved_tensors import version_of
from paddle_recompute._paddle.writes import address_of, addresses_of


class Stamp(NamedTuple):
    """The state of a tensor's write counters. Only a parameter has its address here."""

    version: int
    tick: int
    address: int | None
    content: int | None = None
    """Only of a tensor that travels; see `travels`."""


_tick = 0
_any_travels = False
_last_write: dict[int, int] = {}
"""Address -> tick of the last write there. Allocators reuse addresses, so this stays small."""
_sorted: list[int] = []
"""The addresses, sorted; valid while there are as many as in `_last_write`."""


def tick() -> int | None:
    """How many writes were counted; None if that does not tell of tensors that travel."""
    return None if _any_travels else _tick


def note_write(tensor: paddle.Tensor) -> None:
    """Count a write to `tensor` that is not seen by itself, such as a collective's."""
    global _tick
    _tick += 1
    address = address_of(tensor)
    if address is not None:
        _last_write[address] = _tick


def watch_writes() -> None:
    """Count writes from now on."""
    writes.watch_writes(note_write)


def travels(parameter: paddle.Tensor, content: Callable[[], int]) -> None:
    """From now on, the memory of `parameter` comes and goes; an address tells nothing of it.

    Args:
        parameter: Keeps `content`.
        content: Its number, another one after each write to `parameter`, wherever it is.
    """
    global _any_travels
    _any_travels = True
    parameter._paddle_recompute_content = content


class Stamps:
    """The stamps of many parameters, side by side."""

    __slots__ = ("_addresses", "_stamps", "_tensors", "_tick", "_versions")

    def __init__(self, tensors: list[paddle.Tensor]) -> None:
        self._tensors = tensors
        self._tick = _tick
        self._versions = [*map(version_of, tensors)]
        self._addresses = addresses_of(tensors)
        self._stamps = [*map(stamp, tensors)] if _any_travels else None

    def written(self) -> list[paddle.Tensor]:
        """Those of the tensors that were written to since."""
        tensors, stamps = self._tensors, self._stamps
        if stamps is None:
            versions, addresses = [*map(version_of, tensors)], addresses_of(tensors)
            if (self._tick, self._versions, self._addresses) == (_tick, versions, addresses):
                return []  # nearly always
            stamps = [
                Stamp(version, self._tick, address or None)
                for version, address in zip(self._versions, self._addresses, strict=True)
            ]
        return [t for t, then in zip(tensors, stamps, strict=True) if is_written_since(t, then)]


def stamp(tensor: paddle.Tensor) -> Stamp:
    """The stamp of `tensor` now, for `is_written_since`."""
    content = _content_of(tensor) if _any_travels else None
    if content is not None:
        return Stamp(version_of(tensor), _tick, None, content)
    return stamp_in_place(tensor)


def stamp_in_place(tensor: paddle.Tensor) -> Stamp:
    """`stamp` of a tensor that will not travel before it is asked for."""
    is_parameter = layers.is_parameter(tensor)
    return Stamp(version_of(tensor), _tick, address_of(tensor) if is_parameter else None)


def is_written_since(tensor: paddle.Tensor, then: Stamp) -> bool:
    """Whether `tensor`, or a view of it, was written to since the `stamp` `then`.

    A parameter at another address counts as written to (``w.data = value``); another tensor at
    another address does not.
    """
    if then.content is not None:
        return _content_of(tensor) != then.content
    if version_of(tensor) != then.version:
        return True
    if then.address is not None and address_of(tensor) != then.address:
        return True
    if then.tick == _tick:  # no write at all, nearly always
        return False
    address = address_of(tensor)
    if address is None:
        return False
    return any(_last_write[place] > then.tick for place in _written_places(tensor, address))


def _content_of(tensor: paddle.Tensor) -> int | None:
    content: Callable[[], int] | None = getattr(tensor, "_paddle_recompute_content", None)
    return content() if content is not None else None


def _written_places(tensor: paddle.Tensor, address: int) -> list[int]:
    """The written addresses inside the memory of `tensor`."""
    global _sorted
    if len(_sorted) != len(_last_write):
        _sorted = sorted(_last_write)
    num_bytes = tensor.size * tensor.element_size() if tensor.is_contiguous() else 1
    return _sorted[bisect_left(_sorted, address) : bisect_left(_sorted, address + num_bytes)]
