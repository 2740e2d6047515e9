"""What the places that a function reads hold, side by side in flat lists, compared by identity.

One comparison is a handful of calls of C code over all places. A place that differs is handled by
its `Place` (`places`), which is made only then.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import paddle

from paddle_recompute._paddle.layers import MEMBER_DICTS
from paddle_recompute.replay.names import Reader
from paddle_recompute.replay.places import Entries, Items, Place, fill_dict

_flat = chain.from_iterable
_dict_of: Callable[[object], dict[str, Any]] = attrgetter("__dict__")
_members_of = itemgetter(*MEMBER_DICTS)
_values_of = methodcaller("values")  # not dict.values, which ignores move_to_end
Undo = list[Callable[[], object]]
"""To be called from the last to the first."""


class Snapshot:
    """Attributes, globals and lists, and the sublayers, parameters and hooks of Layers.

    Attributes:
        layers: The Layers; `capture` notes their members.
        places: What cannot be compared by identity, and what the first forward changed.
    """

    __slots__ = (
        "_before", "_containers", "_content", "_exchanges_members", "_keys", "_layer_dicts",
        "_members", "_readers", "_sizes", "_values", "layers", "places",
    )  # fmt: skip

    def __init__(self) -> None:
        self.layers: list[paddle.nn.Layer] = []
        self.places: list[Place] = []
        # Of each dict or list: what is read of it, and what it held.
        self._containers: list[Any] = []
        self._readers: list[Reader] = []
        self._before: list[tuple[Any, ...]] = []

    def add(self, container: Any, reader: Reader, before: tuple[Any, ...]) -> None:
        """Watch `container`, of which `reader` has read `before`: no tensor with a graph."""
        self._containers.append(container)
        self._readers.append(reader)
        self._before.append(before)

    def add_all(
        self, containers: list[Any], readers: list[Reader], before: list[tuple[Any, ...]]
    ) -> None:
        """`add` each."""
        self._containers += containers
        self._readers += readers
        self._before += before

    def capture(self) -> None:
        """Note the lengths, and the members of the Layers."""
        self._note_content()
        self._layer_dicts = [*map(_dict_of, self.layers)]
        self._exchanges_members = False
        self._capture_members()

    def _note_content(self) -> None:
        self._sizes = [*map(len, self._containers)]
        self._content = [*_flat(self._before)]

    def _member_dicts(self) -> list[dict[Any, Any]]:
        return [*_flat(map(_members_of, self._layer_dicts))]

    def _capture_members(self) -> None:
        members = self._member_dicts()
        self._members, full = [*map(len, members)], [*filter(None, members)]
        self._keys, self._values = [*_flat(full)], [*_flat(map(_values_of, full))]

    def _has_same_members(self) -> bool:
        members = self._member_dicts()
        full = [*filter(None, members)]
        return (
            [*map(len, members)] == self._members
            and [*_flat(full)] == self._keys
            and all(map(is_, _flat(map(_values_of, full)), self._values))
        )

    def _members_before(self) -> list[dict[Any, Any]]:
        entries = zip(self._keys, self._values, strict=True)
        return [dict(islice(entries, size)) for size in self._members]

    def _has_same_content(self) -> bool:
        if [*map(len, self._containers)] != self._sizes:
            return False
        try:
            rows = zip(self._readers, self._containers, strict=True)
            now = [read(container) for (_, read, _), container in rows]
        except KeyError:
            return False
        return all(map(is_, _flat(now), self._content))

    def is_unchanged(self) -> bool:
        """Whether nothing differs from before, but what the forward may change."""
        return (
            self._has_same_content()
            and self._has_same_members()
            and all(place.is_unchanged() for place in self.places)
        )

    def read_beside(self, dicts: list[Any]) -> list[tuple[Any, Reader, tuple[Any, ...], int]]:
        """What is compared beside `dicts`: container, reader, what it has read, and the length."""
        known = {*map(id, dicts)}
        rows = zip(self._containers, self._readers, self._before, self._sizes, strict=True)
        return [row for row in rows if id(row[0]) not in known]

    def _changed(self) -> Iterator[tuple[int, Place]]:
        """The places that differ, made as they were."""
        rows = zip(self._containers, self._readers, self._before, self._sizes, strict=True)
        for number, (container, (found, _, names), before, size) in enumerate(rows):
            place: Place
            if names is None:
                place = Items(container, [*before])
            else:
                place = Entries(container, names, dict(zip(found, before, strict=True)), size)
            if not place.is_unchanged():
                yield number, place

    def after_forward(self) -> bool:
        """Accept what the first forward changed, and what it built in a Layer.

        Returns:
            `is_unchanged`, now that this is accepted.
        """
        for place in self.places:
            place.after_forward()
        if not self._has_same_content():
            for number, place in reversed([*self._changed()]):
                place.after_forward()
                self.places.append(place)
                del self._containers[number], self._readers[number], self._before[number]
            self._note_content()
        if not self._has_same_members():
            self._accept_built_members()
            return self.is_unchanged()
        return all(place.is_unchanged() for place in self.places)

    def _accept_built_members(self) -> None:
        """Those that the forward has added, or set in place of None; one that it has exchanged for
        another is put back.
        """
        self._exchanges_members = True
        before = self._members_before()
        self._capture_members()
        accepted = [
            {**old, **now, **{name: value for name, value in old.items() if value is not None}}
            for old, now in zip(before, self._members_before(), strict=True)
        ]
        self._members = [*map(len, accepted)]
        self._keys = [*_flat(accepted)]
        self._values = [*_flat(map(_values_of, accepted))]

    def put_back(self, undo: Undo) -> None:
        """Restore the content of before; `undo` gets what undoes this, and what the second forward
        then changes, but what `Place.after_forward` accepts of that.

        Where nothing was changed so far, by the first forward or by others, a second one that
        does not raise is not looked at afterwards: it does what the first did.
        """
        changed = {} if self._has_same_content() else dict(self._changed())
        for place in (*self.places, *changed.values()):
            undo.append(place.put_back() or functools.partial(_put_back_after, place))
        undo.append(functools.partial(self._put_back_content, changed))
        if self._has_same_members():
            undo.append(self._put_back_members_after)
            return
        for entries in self._member_dicts():
            undo.append(functools.partial(fill_dict, entries, dict(entries)))
        self._put_back_members()

    def _put_back_content(self, but: dict[int, Place]) -> None:
        if (but or _is_raising()) and not self._has_same_content():
            for number, place in self._changed():
                if number not in but:
                    _put_back_after(place)

    def _put_back_members_after(self) -> None:
        if (self._exchanges_members or _is_raising()) and not self._has_same_members():
            self._put_back_members()

    def _put_back_members(self) -> None:
        for entries, before in zip(self._member_dicts(), self._members_before(), strict=True):
            fill_dict(entries, before)


def _is_raising() -> bool:
    return sys.exc_info()[0] is not None


def _put_back_after(place: Place) -> None:
    """Put back what a forward has changed, as after the first one."""
    place.after_forward()
    place.put_back()
