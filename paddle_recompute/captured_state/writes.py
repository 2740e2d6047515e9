"""Which tensors were written to since a forward, found without reading their values.

``Tensor.inplace_version`` counts in-place operators only: the kernels of optimizers,
``set_value``, ``set_state_dict``, ``copy_`` and ``assign`` of an array do not raise it (2.6.2,
3.3.1). If we raised it for them, plain backwards that Paddle allows today would fail. So these
writes are counted here, by address: each write advances a clock, and the last tick of each address
is kept.

Not detected are writes that bypass Paddle's Python API: ``get_tensor()``, DLPack, collectives, and
third-party operators that write to their inputs.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import paddle

from paddle_recompute._paddle import layers, writes
from paddle_recompute._paddle.saved_tensors import version_of
from paddle_recompute._paddle.writes import address_of, addresses_of
from paddle_recompute.captured_state.flags import flag_of, restore_flags


class Stamp(NamedTuple):
    """The state of a tensor's write counters. Only a parameter has its address here."""

    version: int
    tick: int
    address: int | None
    content: int | None = None
    """For offloaded tensors only; see `watch_offloaded`."""


_tick = 0
_any_is_offloaded = False
_last_write: dict[int, int] = {}
"""Address -> tick of the last write there. Allocators reuse addresses, so this stays small."""
_sorted: list[int] = []
"""The addresses, sorted; valid while there are as many as in `_last_write`."""


def note_write(tensor: paddle.Tensor) -> None:
    """Count a write to `tensor` that Paddle does not report, such as that of a collective."""
    global _tick
    _tick += 1
    address = address_of(tensor)
    if address is not None:
        _last_write[address] = _tick


watch_writes = functools.partial(writes.watch_writes, note_write)
"""Count writes from now on."""


def watch_offloaded(parameter: paddle.Tensor, content: Callable[[], int]) -> None:
    """Detect writes to an offloaded `parameter` by `content` instead of by its address.

    Args:
        parameter: A reference to `content` is stored in it.
        content: Returns a number that each write to `parameter` changes.
    """
    global _any_is_offloaded
    _any_is_offloaded = True
    parameter._paddle_recompute_content = content


class Stamps:
    """The stamps of many parameters, side by side.

    Attributes:
        by_forward: The ids of parameters that the first forward itself wrote to.
    """

    __slots__ = (
        "_addresses", "_flags", "_stamps", "_tensors", "_tick", "_versions", "by_forward",
    )  # fmt: skip

    def __init__(self, tensors: list[paddle.Tensor]) -> None:
        addresses = addresses_of(tensors)
        if not all(addresses):  # Paddle 2.6 crashes when the version of such a tensor is read
            pairs = zip(tensors, addresses, strict=True)
            tensors = [t for t, address in pairs if address or _content_of(t) is not None]
            addresses = addresses_of(tensors)
        self._tensors, self._addresses = tensors, addresses
        self._tick = _tick
        self._versions = [*map(version_of, tensors)]
        self._stamps = [*map(stamp, tensors)] if _any_is_offloaded else None
        self._flags = [*map(flag_of, tensors)]
        self.by_forward: AbstractSet[int] = frozenset()

    def after_forward(self) -> None:
        """Note the parameters that the forward itself wrote to."""
        if self._tick != _tick or [*map(version_of, self._tensors)] != self._versions:
            self.by_forward = {*map(id, self.written())}

    def restore_flags(self, undo: list[Any], *, may_change: bool) -> None:
        """See `flags.restore_flags`."""
        restore_flags(self._tensors, self._flags, undo, may_change=may_change)

    def written(self) -> list[paddle.Tensor]:
        """The tensors that were written to since."""
        tensors, stamps = self._tensors, self._stamps
        if stamps is None:
            if (
                self._tick == _tick
                and self._addresses == addresses_of(tensors)
                and self._versions == [*map(version_of, tensors)]
            ):
                return []  # nearly always
            stamps = [
                Stamp(version, self._tick, address or None)
                for version, address in zip(self._versions, self._addresses, strict=True)
            ]
        return [t for t, then in zip(tensors, stamps, strict=True) if is_written_since(t, then)]


def stamp(tensor: paddle.Tensor) -> Stamp:
    """The stamp of `tensor` now, for `is_written_since`."""
    content = _content_of(tensor) if _any_is_offloaded else None
    if content is not None:
        return Stamp(version_of(tensor), _tick, None, content)
    return stamp_in_place(tensor)


def stamp_in_place(tensor: paddle.Tensor) -> Stamp:
    """`stamp` of a tensor that is not offloaded until it is compared."""
    is_parameter = layers.is_parameter(tensor)
    return Stamp(version_of(tensor), _tick, address_of(tensor) if is_parameter else None)


def is_written_since(tensor: paddle.Tensor, then: Stamp) -> bool:
    """Whether `tensor`, or a view of it, was written to since the `stamp` `then`.

    A parameter whose address has changed counts as written to (``w.data = value``); another tensor
    does not.
    """
    if then.content is not None:
        return _content_of(tensor) != then.content
    if then.address is not None and address_of(tensor) != then.address:
        return True
    if version_of(tensor) != then.version:
        return True
    if then.tick == _tick:  # no write at all, nearly always
        return False
    address = address_of(tensor)
    if address is None:
        return False
    return any(_last_write[written] > then.tick for written in _written_addresses(tensor, address))


def released(what: str) -> str:
    """The message of the error for `what`, whose memory was released before the second forward."""
    return (
        f"{what} of a recomputed function has no memory any more: it was released between the "
        "forward and the backward (_clear_data, or _clear_dataptr, as pipeline engines do), so the "
        "forward cannot be repeated. Release it after the backward."
    )


def _content_of(tensor: paddle.Tensor) -> int | None:
    content: Callable[[], int] | None = getattr(tensor, "_paddle_recompute_content", None)
    return content() if content is not None else None


def _written_addresses(tensor: paddle.Tensor, address: int) -> list[int]:
    """The written addresses inside the memory of `tensor`."""
    global _sorted
    if len(_sorted) != len(_last_write):
        _sorted = sorted(_last_write)
    num_bytes = tensor.size * tensor.element_size() if tensor.is_contiguous() else 1
    return _sorted[bisect_left(_sorted, address) : bisect_left(_sorted, address + num_bytes)]
