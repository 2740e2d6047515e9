"""What is looked at of a Layer and of all below it: found once, and valid until something differs.

A plan keeps no object of the user alive. It holds as long as the Layers are the same, and their
classes, what code these have, the names of their attributes, and which of them are plain values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import paddle

from paddle_recompute.replay.names import Codes, kind_of, owners_of

LEAVES = frozenset({int, float, str, bytes, complex, bool, type(None)})
"""The types of what holds nothing else."""
DICT_OF: Callable[[object], dict[str, Any]] = attrgetter("__dict__")
_is_leaf = LEAVES.__contains__
_flat = chain.from_iterable
_sublayers_of = itemgetter("_sub_layers")
Content = list[tuple[Any, ...]]
"""Of each Layer: what its reader reads."""


class Plan:
    """The plan of one Layer.

    Attributes:
        kinds: The place of the first Layer of each class, and what is known of that.
        readers: Of each Layer.
        watched: The places of those whose readers look for a name.
        visited: Of each attribute that may hold something: the place of its Layer, its name, and
            its place in what is read of the Layer.
    """

    __slots__ = (
        "_codes", "_keys", "_layers", "_leaves", "_sizes", "_sublayers", "_types", "kinds",
        "readers", "visited", "watched",
    )  # fmt: skip

    def __init__(self, root: paddle.nn.Layer) -> None:
        layers = layers_below(root)
        self._layers = [*map(weakref.ref, layers)]
        entries = [*map(DICT_OF, layers)]
        self._sublayers = _ids_of_sublayers(entries)
        types = [*map(type, layers)]
        self._types = [*map(weakref.ref, types)]
        kinds = {one: kind_of(one) for one in types}
        named: dict[Any, set[str]] = {}
        for one, kind in kinds.items():
            for owner in owners_of(one):
                named.setdefault(owner, set()).update(kind.named)
        self._codes = Codes(named)
        self.kinds = [(types.index(one), kind) for one, kind in kinds.items()]
        self._sizes, self._keys = [*map(len, entries)], [*_flat(entries)]
        self.readers = [kinds[type(one)].reader(vars(one)) for one in layers]
        self.watched = [at for at, (_, _, names) in enumerate(self.readers) if names]
        content = self._content(entries)
        self._leaves = [*map(_is_leaf, map(type, _flat(content)))]
        self.visited = [
            (at, self.readers[at][0][place], place)
            for at, values in enumerate(content)
            for place, value in enumerate(values)
            if not _is_leaf(type(value))
        ]

    def _content(self, entries: list[dict[str, Any]]) -> Content:
        return [read(one) for (_, read, _), one in zip(self.readers, entries, strict=True)]

    def content(self) -> tuple[list[paddle.nn.Layer], Content] | None:
        """The Layers, and what is read of them; None if the plan does not hold any more."""
        layers: list[Any] = [reference() for reference in self._layers]
        try:
            entries = [*map(DICT_OF, layers)]
        except AttributeError:  # one is gone
            return None
        if (
            [*map(weakref.ref, map(type, layers))] != self._types
            or _ids_of_sublayers(entries) != self._sublayers
            or [*map(len, entries)] != self._sizes
            or [*_flat(entries)] != self._keys
            or not self._codes.are_current()
        ):
            return None
        content = self._content(entries)
        is_same = [*map(_is_leaf, map(type, _flat(content)))] == self._leaves
        return (layers, content) if is_same else None


def _ids_of_sublayers(entries: list[dict[str, Any]]) -> list[int]:
    """Equal for the same ones, while these are alive."""
    return [*map(id, _flat(map(dict.values, map(_sublayers_of, entries))))]


_plans: dict[int, tuple[weakref.ref[paddle.nn.Layer], Plan]] = {}


def plan_of(root: paddle.nn.Layer) -> tuple[list[paddle.nn.Layer], Plan, Content]:
    """`root` and all Layers below it, the plan that holds now, and what is read of each Layer."""
    key = id(root)
    known = _plans.get(key)
    found = known[1].content() if known is not None else None
    if known is None or found is None:
        known = _plans[key] = weakref.ref(root, lambda _: _plans.pop(key, None)), Plan(root)
        found = known[1].content()
        assert found is not None
    return found[0], known[1], found[1]


def layers_below(root: paddle.nn.Layer) -> list[paddle.nn.Layer]:
    """`root` and all Layers below it, each once, in the order of the model."""
    found, waiting = {id(root): root}, [root]
    ordered = []
    while waiting:
        ordered.append(waiting.pop())
        for sublayer in reversed(_sublayers_of(vars(ordered[-1])).values()):
            if sublayer is not None and id(sublayer) not in found:
                found[id(sublayer)] = sublayer
                waiting.append(sublayer)
    return ordered
