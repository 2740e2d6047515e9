"""Walk nested Python values (tuples, lists, `DICTS`, dataclasses) and the tensors inside.

``paddle.utils.flatten`` does not serve: it sorts dict keys, loses dataclasses and subclasses.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import operator
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import paddle

DICTS = (dict, collections.UserDict)
"""What counts as a dict: a tokenizer's ``BatchEncoding`` is a ``UserDict``. Any other mapping is a
leaf, because only these two can be copied with other values whatever their class.
"""

ATOMS = frozenset({paddle.Tensor, int, float, str, bool, type(None)})
"""Types of leaves that `map_leaves` tells at a glance."""


class Leaf:
    """Base of classes whose instances `map_leaves` tells before it looks for containers."""

    __slots__ = ()


def map_tensors(function: Callable[[paddle.Tensor], Any], value: Any) -> Any:
    """`value` with every tensor replaced by ``function(tensor)``.

    Containers are always new objects of their own type (also subclasses and named tuples), so the
    result does not change when the original is appended to; what is neither a container nor
    a tensor is passed on as it is.
    """
    return map_leaves(lambda leaf: function(leaf) if is_tensor(leaf) else leaf, value)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` with everything that is not a container replaced by ``function(leaf)``."""
    kind = type(value)
    if kind in ATOMS:
        return function(value)
    if kind is tuple:
        return tuple([function(i) if type(i) in ATOMS else map_leaves(function, i) for i in value])
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in value.items()} if value else {}
    if issubclass(kind, (paddle.Tensor, Leaf)):
        return function(value)
    if issubclass(kind, tuple):
        items = [map_leaves(function, item) for item in value]
        if all(map(operator.is_, items, value)):
            return value  # a tuple that C has made, such as ``os.stat_result``, cannot be filled
        return tuple_of(kind, items, attributes_of(value))
    if issubclass(kind, list):
        items_of = copy.copy(value)
        items_of[:] = [map_leaves(function, item) for item in list.__iter__(value)]
        return items_of
    if issubclass(kind, DICTS):
        fresh: Any = copy.copy(value)
        for key in list(value):
            fresh[key] = map_leaves(function, value[key])
        return fresh
    if _is_dataclass_instance(value):
        fresh = copy.copy(value)
        for name, item in _fields_of(value):
            # object.__setattr__: a frozen dataclass must be fillable too.
            object.__setattr__(fresh, name, map_leaves(function, item))
        return fresh
    return function(value)


def tuple_of(kind: type[Any], items: Iterable[Any], attributes: dict[str, Any] | None) -> Any:
    """A tuple of the class `kind`, whose own ``__new__`` may take other arguments."""
    fresh = tuple.__new__(kind, items)
    if attributes:
        vars(fresh).update(attributes)
    return fresh


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of `value`, whatever its ``__getattr__`` does; None: it has none."""
    read = threading.local if issubclass(type(value), threading.local) else object
    try:
        return read.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return None


def taken_out(value: Any, is_taken: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """The structure of `value` without the leaves that `is_taken`, for `put_in`; and those."""
    taken: list[Any] = []

    def take(leaf: Any) -> Any:
        if not is_taken(leaf):
            return leaf
        taken.append(leaf)
        return _TAKEN

    return map_leaves(take, value), taken


def put_in(structure: Any, leaves: Iterable[Any]) -> Any:
    """The `structure` of `taken_out` with `leaves` in the places of those that were taken."""
    order = iter(leaves)
    return map_leaves(lambda leaf: next(order) if leaf is _TAKEN else leaf, structure)


_TAKEN = object()


def tensors_in(value: Any) -> Iterator[paddle.Tensor]:
    """The tensors in `value`, depth first, in the order of `map_tensors`; repeats included."""
    return filter(is_tensor, leaves_of(value))


def leaves_of(value: Any) -> list[Any]:
    """Everything in `value` that is not a container, depth first."""
    found: list[Any] = []
    _add_leaves(value, found)
    return found


def _add_leaves(value: Any, found: list[Any]) -> None:
    kind = type(value)
    if issubclass(kind, paddle.Tensor):
        found.append(value)
    elif issubclass(kind, (tuple, list)):
        for item in list.__iter__(value) if issubclass(kind, list) else value:
            if type(item) in ATOMS:
                found.append(item)
            else:
                _add_leaves(item, found)
    elif issubclass(kind, DICTS):
        for item in value.values():
            _add_leaves(item, found)
    elif _is_dataclass_instance(value):
        for _, item in _fields_of(value):
            _add_leaves(item, found)
    else:
        found.append(value)


def named_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs of a readable path (``[0]['mask'].scale``) and what stands there."""
    kind = type(value)
    if issubclass(kind, paddle.Tensor):
        yield name, value
    elif issubclass(kind, (tuple, list)):
        for index, item in enumerate(list.__iter__(value) if issubclass(kind, list) else value):
            yield from named_leaves(item, f"{name}[{index}]")
    elif issubclass(kind, DICTS):
        for key, item in value.items():
            yield from named_leaves(item, f"{name}[{key!r}]")
    elif _is_dataclass_instance(value):
        for field, item in _fields_of(value):
            yield from named_leaves(item, f"{name}.{field}")
    else:
        yield name, value


def is_tensor(value: object) -> bool:
    """Whether `value` is a dygraph tensor."""
    return issubclass(type(value), paddle.Tensor)


def describe(tensor: paddle.Tensor) -> str:
    """``float32[8, 16]``."""
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def dtype_name(dtype: object) -> str:
    """``float32`` for ``paddle.float32``, whatever this Paddle prints."""
    return str(dtype).rpartition(".")[2]


def _fields_of(value: Any) -> list[tuple[str, Any]]:
    """Of a dataclass; one that its ``__init__`` does not take may not be set yet."""
    names = [field.name for field in dataclasses.fields(value)]
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _is_dataclass_instance(value: object) -> bool:
    return hasattr(type(value), "__dataclass_fields__")
