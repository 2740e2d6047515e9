"""Values of locations, kept without the graphs of their tensors."""

from __future__ import annotations

import weakref
from typing import Any

import paddle

from paddle_recompute import _nested


class DetachedValue:
    """A tensor with a graph, or a tuple that contains such tensors, kept without the graphs.

    With its graph, a location that is assigned in every step would link the graphs of all steps.
    """

    __slots__ = ("_attributes", "_kind", "_original", "_value")

    def __init__(self, value: Any) -> None:
        self._kind = type(value)
        if isinstance(value, tuple):
            self._value: Any = [*map(detach_value, value)]
            self._attributes = _nested.attributes_of(value)
        else:
            self._original = weakref.ref(value)
            self._value = value.detach()
            self._value.stop_gradient = value.stop_gradient

    def is_(self, now: Any) -> bool:
        """Whether `now` is the tensor itself, or a tuple of the same objects."""
        if isinstance(self._value, list):
            is_like = type(now) is self._kind and len(now) == len(self._value)
            return is_like and all(map(is_same, self._value, now))
        return now is not None and self._original() is now

    def get(self) -> Any:
        """The original tensor, or a detached one if the original was freed; a tuple of these."""
        if isinstance(self._value, list):
            items = [original_of(item) for item in self._value]
            return _nested.tuple_of(self._kind, items, self._attributes)
        original = self._original()
        return self._value if original is None else original


def detach_value(value: Any) -> Any:
    """`value` without graphs, if it is a tensor or a tuple that contains tensors."""
    kind = type(value)
    if issubclass(kind, paddle.Tensor):
        return value if value.is_leaf else DetachedValue(value)
    return DetachedValue(value) if issubclass(kind, tuple) and not _is_leaf(value) else value


def _is_leaf(value: Any) -> bool:
    kind = type(value)
    if issubclass(kind, paddle.Tensor):
        return bool(value.is_leaf)
    return not issubclass(kind, tuple) or all(map(_is_leaf, value))


def original_of(held: Any) -> Any:
    """The value that was given to `detach_value`, or a detached one if it was freed."""
    return held.get() if isinstance(held, DetachedValue) else held


def is_same(held: Any, now: Any) -> bool:
    """Whether `now` is the object that `detach_value` was given."""
    return held is now or (isinstance(held, DetachedValue) and held.is_(now))
