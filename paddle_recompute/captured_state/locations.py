"""Locations (attributes, globals, cells...) that a function reads, and how to restore them."""

from __future__ import annotations

import contextlib
import enum
import operator
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

import paddle

from paddle_recompute._nested import attributes_of
from paddle_recompute._paddle.layers import MEMBER_DICTS, is_parameter
from paddle_recompute.captured_state.detached_values import (
    DetachedValue,
    detach_value,
    is_same,
    original_of,
)

FLAG = "training"
"""The train/eval flag of a Layer."""
ABSENT = object()
Container = list[Any] | deque[Any] | dict[Any, Any]
_NUMBERS = (int, float, str, bytes, complex)  # bool is an int


Found = Callable[[], AbstractSet[int]]
"""Returns the ids of what existed before the forward; the forward has not built these objects."""


class Location(Protocol):
    """Something with content that can be replaced."""

    def after_forward(self, found: Found) -> None:
        """Accept changes of the first forward that are not restored."""

    def exchanges_member(self) -> bool:
        """Whether a Layer or parameter will be restored here. Call `after_forward` before."""

    def is_unchanged(self) -> bool:
        """Whether the content is the recorded one, except for accepted changes."""

    def restore(self) -> Callable[[], None] | None:
        """Restore the recorded content; returns a function that undoes it, None if unchanged."""


class Entries:
    """Values that code looks up by name: attributes, globals, a variable of a closure, defaults.

    Attributes:
        entries: The dict or `Attributes` in which they are looked up.
        is_state: Whether numbers are restored, too; to be set before `after_forward`.
    """

    __slots__ = ("_before", "_left", "_names", "_size", "entries", "is_state")

    def __init__(
        self,
        entries: dict[str, Any] | Attributes,
        names: AbstractSet[str],
        before: dict[str, Any],
        size: int,
    ) -> None:
        """`names` are looked up; `before` are the existing ones (`detach_value`), of `size`
        entries.
        """
        self.entries = entries
        self._names = names
        self._before = before
        self._left: dict[str, Any] = {}
        """The names that are not restored, and their content before; `ABSENT`: there was none."""
        self._size = size
        self.is_state = False

    def after_forward(self, found: Found) -> None:
        """See `Location`: numbers, and Layers and parameters that the forward has built, keep their
        new value. Train/eval flags are restored, so that both forwards run in the same mode.

        A Layer or parameter is built if the name had none before, and if the object, or another one
        that is built in the same dict, is not in `found`.

        Numbers are restored, too, if the forward has rebound a tensor of their object, or that is a
        Layer with buffers: they may be the length of a cache, or say that it is filled. See also
        `restore_numbers`.
        """
        now = self.entries
        if changed := {name: _held_now(now, name) for name in self._changed() if name != FLAG}:
            for name in self._accepted(changed, found):
                self._left[name] = self._before.pop(name, ABSENT)
        self._size = len(now) if self._size == len(now) else -1

    def _accepted(self, changed: dict[str, Any], found: Found) -> set[str]:
        """Which of the names in `changed`, with their new values, are not restored."""
        before = self._before
        built = {
            name
            for name, value in changed.items()
            if is_member(value) and not is_member(before.get(name))
        }
        if built and {id(changed[name]) for name in built} <= found():
            built = set()
        if self.is_state or any(
            isinstance(value, paddle.Tensor) for name, value in changed.items() if name not in built
        ):
            return built
        return built | {
            name
            for name, value in changed.items()
            if isinstance(before.get(name), _NUMBERS) and not is_member(value)
        }

    def exchanges_member(self) -> bool:
        """See `Location`."""
        before, now = self._before, self.entries
        return any(
            is_member(before.get(name)) or is_member(_held_now(now, name))
            for name in self._changed()
        )

    def restore_numbers(self) -> None:
        """Restore numbers, too: the forward has exchanged a Layer or parameter somewhere, and one
        of them may say that this is done.
        """
        self.is_state = True
        for name in [*self._left]:
            if not is_member(_held_now(self.entries, name)):
                self._before[name] = self._left.pop(name)

    def restore(self) -> Callable[[], None] | None:
        """See `Location`."""
        entries, changed = self.entries, self._changed()
        if not changed:
            return None
        # Unchanged entries, too: the second forward may change them.
        names = (self._before.keys() | self._names) - self._left.keys()
        now = {name: entries.get(name, ABSENT) for name in names}
        before = self._before
        _assign(entries, {name: original_of(before.get(name, ABSENT)) for name in changed})
        return lambda: _assign(entries, now)

    def is_unchanged(self) -> bool:
        """See `Location`."""
        return not self._changed()

    def _changed(self) -> list[str]:
        entries, before = self.entries, self._before
        if len(entries) == self._size and _are(before.values(), map(entries.get, before)):
            return []  # nearly always
        changed = [
            name for name, held in before.items() if not is_same(held, entries.get(name, ABSENT))
        ]
        changed += (self._names & entries.keys()) - before.keys() - self._left.keys()
        return changed


def _held_now(entries: dict[str, Any] | Attributes, name: str) -> Any:
    """The present value of `name`; a Layer has its Layers and parameters in separate dicts."""
    value = entries.get(name)
    for members in MEMBER_DICTS[:2] if value is None else ():
        value = entries.get(members, {}).get(name, value)
    return value


def _are(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether two iterables of equal length hold the same objects."""
    return all(map(operator.is_, some, others))


def _assign(entries: dict[str, Any] | Attributes, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is not ABSENT:
            entries[name] = value
        else:
            entries.pop(name, None)


def _is_data(value: Any) -> bool:
    """Whether `value` is data (numbers, text, dtypes, shapes), which cannot hold a tensor."""
    if issubclass(
        type(value), paddle.Tensor | DetachedValue
    ):  # a `DetachedValue` contains a tensor
        return False
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(map(_is_data, value.keys())) and all(map(_is_data, value.values()))
    return isinstance(value, type | enum.Enum) or attributes_of(value) is None


def is_member(value: Any) -> bool:
    """Whether `value` is a Layer or a parameter."""
    return isinstance(value, paddle.nn.Layer) or is_parameter(value)


def fill_dict(entries: dict[Any, Any], values: dict[Any, Any]) -> None:
    """Replace the content of `entries` by `values`."""
    entries.clear()
    entries.update(values)


class Items:
    """The items of a list or deque, or of a dict that is not a `__dict__`."""

    __slots__ = ("_before", "_container", "_is_own")

    def __init__(self, container: Container, before: list[Any]) -> None:
        """`before` are the items of `container` (`detach_value`), in the order of `items_of`."""
        self._container = container
        self._before = before
        self._is_own = False

    def after_forward(self, found: Found) -> None:
        """A list of data that the forward changes keeps its new items, and so does a list to which
        it adds Layers that it builds and from which it removes none. Tensors and other objects, as
        those of a cache, are restored.
        """
        if self.is_unchanged():
            return
        now = items_of(self._container)
        old, new = _members(self._before), _members(now)
        self._is_own = all(map(_is_data, (*self._before, *now))) or (
            old < new and not new - old <= found()
        )
        if self._is_own:
            self._before = []

    def exchanges_member(self) -> bool:
        """See `Location`."""
        now = items_of(self._container)
        return not self.is_unchanged() and _members(self._before) != _members(now)

    def restore(self) -> Callable[[], None] | None:
        """See `Location`."""
        if self.is_unchanged():
            return None
        container, now = self._container, items_of(self._container)
        _fill(container, [original_of(item) for item in self._before])
        return lambda: _fill(container, now)

    def is_unchanged(self) -> bool:
        """See `Location`."""
        now = items_of(self._container)
        return self._is_own or (
            len(now) == len(self._before) and all(map(is_same, self._before, now))
        )


def _members(items: list[Any]) -> set[int]:
    """The ids of the Layers and parameters among `items`."""
    return {id(item) for item in items if is_member(item)}


def items_of(container: Container) -> list[Any]:
    """The items of a list or deque; of a dict, its keys and then its values."""
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def _fill(container: Container, items: list[Any]) -> None:
    if isinstance(container, dict):
        half = len(items) // 2
        fill_dict(container, dict(zip(items[:half], items[half:], strict=True)))
    else:
        container.clear()
        container.extend(items)


class Attributes:
    """Attributes of a cell, of a function or in slots, with the interface of a dict; bypasses
    ``__getattr__`` and ``__setattr__`` of the owner's class.
    """

    __slots__ = ("_owner",)

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return object.__getattribute__(self._owner, name)
        except (ValueError, AttributeError):  # an empty cell, an empty slot
            return default

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def pop(self, name: str, default: Any = None) -> None:
        with contextlib.suppress(AttributeError):  # a slot that is empty already
            object.__delattr__(self._owner, name)

    def keys(self) -> AbstractSet[str]:
        return frozenset()  # attributes that are added later are not looked up

    def __len__(self) -> int:
        return 0


def of_attributes(owner: Any, names: Iterable[str], values: Iterable[Any]) -> Entries:
    """The attributes `names` with their `values`; `ABSENT`: it does not exist."""
    before = {name: detach_value(value) for name, value in zip(names, values, strict=True)}
    return Entries(Attributes(owner), frozenset(), before, 0)
