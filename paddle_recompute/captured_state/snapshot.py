"""The snapshot of all locations that a function reads: their contents in flat lists.

Contents are compared by identity, in a few calls of C code over all locations. A `Location`
(`locations`) is made only for a location that differs.
"""

from __future__ import annotations

import functools
import sys
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import accumulate, chain, islice
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import paddle

from paddle_recompute._paddle.layers import BUFFERS, MEMBER_DICTS, STATISTICS, layers_below
from paddle_recompute.captured_state.locations import (
    FLAG,
    Entries,
    Found,
    Items,
    Location,
    fill_dict,
)
from paddle_recompute.captured_state.names import Reader, reader_of
from paddle_recompute.errors import RecomputeError

_flat = chain.from_iterable
_attributes_of: Callable[[Any], dict[str, Any]] = attrgetter("__dict__")
_members_of, _buffers_of = itemgetter(*MEMBER_DICTS), itemgetter(BUFFERS)
_values_of = methodcaller("values")  # takes three times as long as dict.values
Undo = list[Callable[[], object]]
"""To be called from the last to the first."""


class Snapshot:
    """Attributes, globals and lists, and the sublayers, parameters and hooks of Layers.

    Attributes:
        layers: The Layers.
        locations: Locations that cannot be compared by identity, or that the first forward changed.
    """

    __slots__ = (
        "_classes", "_containers", "_content", "_exchanges_members", "_keys", "_layer_dicts",
        "_members", "_num_buffers", "_num_read", "_readers", "_sizes", "_values", "layers",
        "locations",
    )  # fmt: skip

    def __init__(self) -> None:
        self.layers: list[paddle.nn.Layer] = []
        self.locations: list[Location] = []
        self._classes: list[Any] = []
        self._layer_dicts: list[dict[str, Any]] = []
        # The lengths of the `MEMBER_DICTS` of each Layer, and their keys and values.
        self._members: list[int] = []
        self._keys: list[Any] = []
        self._values: list[Any] = []
        self._num_buffers: list[int] = []
        self._exchanges_members = False
        # For each dict or list: the reader, the length, and the number of values that were read
        # (not the length in subclasses with a `__len__` of their own). All values, in one list.
        self._containers: list[Any] = []
        self._readers: list[Reader] = []
        self._sizes: list[int] = []
        self._num_read: list[int] = []
        self._content: list[Any] = []

    def add(self, container: Any, reader: Reader, before: tuple[Any, ...]) -> None:
        """Record `container`; `before` are the values that `reader` read, none with a graph."""
        self._containers.append(container)
        self._readers.append(reader)
        self._sizes.append(len(container))
        self._num_read.append(len(before))
        self._content += before

    def add_all(
        self, containers: list[Any], readers: list[Reader], before: list[tuple[Any, ...]]
    ) -> None:
        """`add` for many containers."""
        self._containers += containers
        self._readers += readers
        self._sizes += map(len, containers)
        self._num_read += map(len, before)
        self._content += _flat(before)

    def add_flags(self, layers: list[paddle.nn.Layer]) -> None:
        """Record the train/eval flags of `layers`."""
        for layer in layers:
            entries = layer.__dict__
            reader = reader_of(entries, {FLAG})
            self.add(entries, reader, reader.read(entries))

    def add_layers(self, layers: list[paddle.nn.Layer]) -> list[dict[str, Any]]:
        """Record sublayers, parameters and hooks of `layers`; returns their ``__dict__``."""
        dicts = [*map(_attributes_of, layers)]
        self.layers += layers
        self._layer_dicts += dicts
        self._num_buffers += map(len, map(_buffers_of, dicts))
        self._note_members(dicts)
        return dicts

    def beside_layers(self) -> Iterator[tuple[Any, AbstractSet[str] | None]]:
        """Each container outside of Layers, and the names that are looked up in it; None: all."""
        of_layers = {*map(id, self._layer_dicts)}
        for container, (_, _, names) in zip(self._containers, self._readers, strict=True):
            if id(container) not in of_layers:
                yield container, names

    def has_hooks(self) -> bool:
        """Whether a Layer has hooks; they are the last two of `MEMBER_DICTS`."""
        return any(self._members[2::4]) or any(self._members[3::4])

    def _member_dicts(self) -> list[dict[Any, Any]]:
        return [*_flat(map(_members_of, self._layer_dicts))]

    def _note_members(self, layer_dicts: list[dict[str, Any]]) -> None:
        members = [*_flat(map(_members_of, layer_dicts))]
        keys, values = _content_of(members)
        self._members += map(len, members)
        self._keys += keys
        self._values += values

    def _has_same_members(self) -> bool:
        members = [*_flat(map(_members_of, self._layer_dicts))]  # `_member_dicts`
        keys, values = _content_of(members)
        return (
            [*map(len, members)] == self._members
            and keys == self._keys
            and all(map(is_, values, self._values))
        )

    def _members_before(self) -> list[dict[Any, Any]]:
        entries = zip(self._keys, self._values, strict=True)
        return [dict(islice(entries, size)) for size in self._members]

    def _differing(self) -> Iterable[int]:
        """The numbers of the dicts and lists that may differ; nearly always none."""
        rows = zip(self._readers, self._containers, strict=True)
        try:
            now = [read(container) for (_, read, _), container in rows]
        except KeyError:
            return range(len(self._containers))
        if [*map(len, self._containers)] != self._sizes:
            return range(len(self._containers))
        if all(map(is_, _flat(now), self._content)):
            return ()
        if [*map(len, now)] != self._num_read:
            return range(len(self._containers))
        ends, same = [*accumulate(self._num_read)], map(is_, _flat(now), self._content)
        return sorted({bisect(ends, index) for index, is_same in enumerate(same) if not is_same})

    def _changed(self) -> dict[int, Location]:
        """A `Location` with the recorded content for each container that differs, by its number."""
        locations: dict[int, Location] = {}
        for number in self._differing():
            container, reader = self._containers[number], self._readers[number]
            before, size = self._content[self._span(number)], self._sizes[number]
            if _is_same(container, reader, before, size):
                continue
            found, _, names = reader
            location: Location
            if names is None:
                location = Items(container, before)
            else:
                location = Entries(container, names, dict(zip(found, before, strict=True)), size)
            if not location.is_unchanged():
                locations[number] = location
        self._set_states(locations.values())
        return locations

    def _span(self, number: int) -> slice:
        """Where the values of a dict or list are in `_content`."""
        start = sum(self._num_read[:number])
        return slice(start, start + self._num_read[number])

    def _set_states(self, locations: Iterable[Location]) -> None:
        """Set `Entries.is_state` of the attributes of Layers: numbers are restored with buffers.

        A Layer has such a state if it has, or had, buffers. Not if it has built Layers or
        parameters and no buffers: then its numbers may record that these are built.
        """
        found = [
            location
            for location in locations
            if isinstance(location, Entries) and type(location.entries) is dict
        ]
        if not found:
            return
        numbers = {id(entries): number for number, entries in enumerate(self._layer_dicts)}
        for location in found:
            if (number := numbers.get(id(location.entries))) is not None:
                layer, size = self.layers[number], self._num_buffers[number]
                location.is_state = size < len(layer._buffers)
                if size or STATISTICS[0] in layer._parameters:
                    builders = {id(self.layers[number]) for number in self._builders()}
                    below = map(id, layers_below(layer)) if builders else ()
                    location.is_state |= builders.isdisjoint(below)

    def _builders(self, found: AbstractSet[int] = frozenset()) -> set[int]:
        """The numbers of the Layers with a member, not in `found`, where None or nothing was."""
        if self._has_same_members():
            return set()
        before = self._members_before()
        return {
            number
            for number, layer in enumerate(self.layers)
            for old, now in zip(before[4 * number :][:2], _members_of(layer.__dict__), strict=False)
            if any(
                member is not None and old.get(name) is None and id(member) not in found
                for name, member in now.items()
            )
        }

    def is_unchanged(self) -> bool:
        """Whether no location differs, except in what `after_forward` has accepted."""
        return (
            not self._changed()
            and all(map(is_, map(type, self.layers), self._classes))
            and self._has_same_members()
            and all(location.is_unchanged() for location in self.locations)
        )

    def found(self) -> set[int]:
        """The ids of the recorded Layers, and of their sublayers, parameters and hooks."""
        return {*map(id, self.layers), *map(id, self._values)}

    def after_forward(self, found: Found) -> bool:
        """Accept the changes of the first forward that are not restored, and Layers that it built:
        those that are not in `found`.

        Returns:
            `is_unchanged`, after that.
        """
        self._classes = [*map(type, self.layers)]
        if self.locations:
            self._set_states(self.locations)
            for location in self.locations:
                location.after_forward(found)
        for number, location in reversed(self._changed().items()):
            location.after_forward(found)
            self.locations.append(location)
            del self._content[self._span(number)]
            for fields in (self._containers, self._readers, self._sizes, self._num_read):
                del fields[number]
        if not self._has_same_members():
            self._accept_built_members(found())
        elif not self.locations or all(location.is_unchanged() for location in self.locations):
            return True
        if self._has_exchanged_members() or any(
            location.exchanges_member() for location in self.locations
        ):
            for location in self.locations:
                if isinstance(location, Entries):
                    location.restore_numbers()
        return self.is_unchanged()

    def _has_exchanged_members(self) -> bool:
        """Whether a sublayer or parameter of a Layer is to be restored."""
        return any(
            old.get(name) is not now.get(name)
            for number, (old, now) in enumerate(
                zip(self._members_before(), self._member_dicts(), strict=True)
            )
            if number % 4 < 2
            for name in old.keys() | now.keys()
        )

    def _accept_built_members(self, found: AbstractSet[int]) -> None:
        """Accept members that the forward has added, or assigned where None was, to a Layer that
        builds one; a member that it has replaced is restored.
        """
        self._exchanges_members = True
        builders, before = self._builders(found), self._members_before()
        self._members, self._keys, self._values = [], [], []
        self._note_members(self._layer_dicts)
        accepted = [
            {**old, **now, **{name: value for name, value in old.items() if value is not None}}
            if number // 4 in builders or number % 4 > 1  # hooks
            else old
            for number, (old, now) in enumerate(zip(before, self._members_before(), strict=True))
        ]
        self._members = [*map(len, accepted)]
        self._keys = [*_flat(accepted)]
        self._values = [*_flat(map(_values_of, accepted))]

    def restore(self, undo: Undo) -> None:
        """Restore the recorded content; `undo` gets functions that undo this and the changes of the
        second forward, except those that `Location.after_forward` accepts.

        If nothing has changed so far, the second forward changes nothing either, so locations are
        compared after it only if it raises.

        Raises:
            RecomputeError: A Layer has another class, with another ``forward``.
        """
        for layer, kind in zip(self.layers, self._classes, strict=True):
            # Wrapping a Layer changes its class, and not the ``forward`` of that.
            if type(layer) is not kind and type(layer).forward is not kind.forward:
                raise RecomputeError(
                    f"{layer.full_name()}, which a recomputed function reaches, was a "
                    f"{kind.__name__} in the forward and is a {type(layer).__name__} in the "
                    "backward. Run the backward before the change."
                )
        changed = self._changed()
        for location in (*self.locations, *changed.values()):
            undo.append(location.restore() or functools.partial(self._restore_after, location))
        is_same = self._has_same_members()
        undo.append(functools.partial(self._restore_rest, changed, is_same))
        if not is_same:
            for entries in self._member_dicts():
                undo.append(functools.partial(fill_dict, entries, dict(entries)))
            self._restore_members()

    def _restore_rest(self, but: dict[int, Location], had_same_members: bool) -> None:
        has_raised = sys.exc_info()[0] is not None
        may_differ = had_same_members and (self._exchanges_members or has_raised)
        if may_differ and not self._has_same_members():
            self._restore_members()
        if but or has_raised:
            for number, location in self._changed().items():
                if number not in but:
                    self._restore_after(location)

    def _restore_after(self, location: Location) -> None:
        """Undo what the second forward has changed, except what is accepted."""
        location.after_forward(self.found)
        location.restore()

    def _restore_members(self) -> None:
        for entries, before in zip(self._member_dicts(), self._members_before(), strict=True):
            fill_dict(entries, before)


def _content_of(dicts: list[dict[Any, Any]]) -> tuple[list[Any], Iterator[Any]]:
    """All keys and all values of `dicts`, most of which are empty, in the order of each."""
    full = [*filter(None, dicts)]
    keys = [*_flat(full)]
    is_in_order = keys == [*_flat(map(dict.keys, full))]  # not so after move_to_end
    return keys, _flat(map(dict.values if is_in_order else _values_of, full))


def _is_same(container: Any, reader: Reader, before: list[Any], size: int) -> bool:
    try:
        return len(container) == size and all(map(is_, reader.read(container), before))
    except KeyError:
        return False
