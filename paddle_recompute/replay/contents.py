"""What a place holds, held without the graphs of its tensors."""

from __future__ import annotations

import weakref
from typing import Any

import paddle


class Held:
    """A tensor with a graph, held without its graph.

    Otherwise a place that is assigned in every step would link each graph to the one before.
    """

    __slots__ = ("_original", "_value")

    def __init__(self, tensor: paddle.Tensor) -> None:
        self._original = weakref.ref(tensor)
        self._value = _without_graph(tensor)

    def is_(self, now: object) -> bool:
        """Whether `now` is the tensor itself."""
        return now is not None and self._original() is now

    def get(self) -> paddle.Tensor:
        """The tensor, or its value if nobody else holds it."""
        original = self._original()
        return self._value if original is None else original


class HeldTuple:
    """A tuple that contains such tensors; `is_` and `get` as of `Held`."""

    __slots__ = ("_items", "_kind")

    def __init__(self, value: tuple[Any, ...]) -> None:
        self._kind = type(value)
        self._items = [hold(item) for item in value]

    def is_(self, now: object) -> bool:
        return (
            isinstance(now, self._kind)
            and len(now) == len(self._items)
            and all(map(is_same, self._items, now))
        )

    def get(self) -> tuple[Any, ...]:
        items = [content_of(item) for item in self._items]
        return self._kind(*items) if hasattr(self._kind, "_fields") else self._kind(items)


_HELD = (Held, HeldTuple)


def hold(value: Any) -> Any:
    """What to keep instead of `value`: without graph, if it is a tensor, or a tuple of some."""
    if isinstance(value, paddle.Tensor):
        return value if value.is_leaf else Held(value)
    if isinstance(value, tuple) and any(not _is_leaf(item) for item in value):
        return HeldTuple(value)
    return value


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, (paddle.Tensor, tuple)) or (
        value.is_leaf if isinstance(value, paddle.Tensor) else all(map(_is_leaf, value))
    )


def _without_graph(tensor: paddle.Tensor) -> paddle.Tensor:
    detached = tensor.detach()
    detached.stop_gradient = tensor.stop_gradient
    return detached


def content_of(held: Any) -> Any:
    """The value that `hold` was given; if nobody else holds it, one with the same memory."""
    return held.get() if isinstance(held, _HELD) else held


def is_same(held: Any, now: Any) -> bool:
    """Whether `now` is the object that `hold` was given."""
    return held is now or (isinstance(held, _HELD) and held.is_(now))
