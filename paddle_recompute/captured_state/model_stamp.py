"""`ModelStamp`: has a model changed since it was stamped? Cheap enough for every step."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import paddle

from paddle_recompute._paddle.layers import (
    SUBLAYERS_AND_HOOKS,
    attributes_of_every_layer,
    forward_post_hooks,
    forward_pre_hooks,
    own_sublayers,
)
from paddle_recompute.captured_state.captured_state import read_by
from paddle_recompute.captured_state.names import kind_of

_DICTS = (dict, collections.OrderedDict)
_COMPARED_BY_VALUE = (bool, int, float, complex, type(None), str, bytes)
_members_of = itemgetter(*SUBLAYERS_AND_HOOKS)


class ModelStamp:
    """The state that the forwards of a model read: classes, sublayers, hooks and attributes of its
    Layers, and the captured state in plain objects, lists, dicts, globals and closures.

    Args:
        model: The model.
        code: Functions that are called beside it, such as a loss.
    """

    def __init__(self, model: paddle.nn.Layer, *code: Any) -> None:
        self._model, self._code = model, code
        self._record()

    def change(self) -> str:
        """The name of what has changed since the last call or the construction; "" if nothing has.

        All entries are compared by identity, in C. Locations are read one by one only if an entry
        differs. New objects are compared from then on.
        """
        is_rest_same = all(location.is_unchanged() for location in self._rest)
        if is_rest_same and all(map(is_, self._entries_now(), self._seen)):
            return ""
        then = self._held
        self._record()
        for location in {**then, **self._held}:
            label, old = then.get(location, ("", _ABSENT))
            label, new = self._held.get(location, (label, _ABSENT))
            is_equal = type(old) is type(new) and isinstance(old, _COMPARED_BY_VALUE) and old == new
            if old is not new and not is_equal:
                return label
        return "" if is_rest_same else "a variable of a closure"

    def _record(self) -> None:
        """Record the state that the model reads now."""
        names, texts, found = read_by((self._model, *self._code))
        self._layers, self._rest = found.layers, found.locations
        self._dicts = [*map(vars, self._layers)]
        known = {id(layer): name for name, layer in self._model.named_sublayers(include_self=True)}
        paths = [known.get(id(layer)) or type(layer).__name__ for layer in self._layers]
        locations: list[tuple[str, dict[Any, Any], Callable[[Any], bool] | None]] = []
        """Label, dict, and a test for the keys that are compared; None: all keys."""
        for layer, name in zip(self._layers, paths, strict=True):
            label = "{}" if layer is self._model else f"{name}.{{}}"
            locations.append((label, vars(layer), _read_by(layer, names)))
            locations.append((label, own_sublayers(layer), None))
            if layer is not self._model:  # hooks of the model itself run outside of its Program
                for hooks in (forward_pre_hooks(layer), forward_post_hooks(layer)):
                    locations.append((f"the hooks of {name}", hooks, None))
        inner, named = {}, set()
        own = {id(value) for entries in self._dicts for value in entries.values()}
        for container, read in found.beside_layers():
            if read is not None:
                locations.append(("{}", container, read.__contains__))
            elif type(container) in _DICTS and id(container) not in own:
                # Only keys that the code names are compared: others may count steps.
                locations.append(
                    ("{}", container, lambda key: type(key) is not str or key in texts)
                )
                named.add(id(container))
            else:
                inner[id(container)] = container
        self._entries = [entries for _, entries, _ in locations]
        self._whole = [entries for _, entries, matters in locations if matters is None]
        self._read: dict[itemgetter[Any], dict[Any, Any]] = {}
        for _, entries, matters in locations:
            if matters is not None and (keys := [*filter(matters, entries)]):
                self._read[itemgetter(*keys, keys[0])] = entries  # with one key it returns no tuple
        inner |= {
            id(value): value for value in self._values_now() if type(value) in (list, *_DICTS)
        }
        self._containers = [container for key, container in inner.items() if key not in named]
        # A tensor with a graph is not kept, so its location differs in each comparison.
        self._seen = [*map(_without_graph, [*self._entries_now()])]
        self._held = {
            (id(entries), key, at): (label.format(key), _without_graph(item))
            for label, entries, matters in locations
            for key, value in [*entries.items()]
            if matters is None or matters(key)
            for at, item in enumerate([value, *_inside(value)])
        }
        for layer, name in zip(self._layers, paths, strict=True):
            self._held[id(layer), "", 0] = f"the class of {name}", type(layer)
        for container in self._containers:
            for at, item in enumerate(_inside(container)):
                content = _without_graph(item)
                self._held[id(container), "", at] = "an item of a list or dict", content

    def _entries_now(self) -> Iterator[Any]:
        """All that is compared by identity: classes and dicts of the Layers, keys, values, and
        items of lists and dicts. `_ABSENT` at the end lets sequences of different lengths differ.
        """
        return chain(
            map(type, self._layers),
            map(vars, self._layers),
            chain.from_iterable(map(_members_of, self._dicts)),
            chain.from_iterable(self._entries),
            self._values_now(),
            chain.from_iterable(map(_inside, self._containers)),
            [_ABSENT],
        )

    def _values_now(self) -> Iterator[Any]:
        read = map(itemgetter.__call__, self._read, self._read.values())
        whole = chain.from_iterable(map(dict.values, filter(None, self._whole)))
        return chain(whole, chain.from_iterable(read))


def _read_by(layer: paddle.nn.Layer, others: frozenset[str] | None) -> Callable[[str], bool]:
    """Whether an attribute of `layer` may be looked up: by its forward, or by `others`."""
    read, own = kind_of(type(layer)).attributes, attributes_of_every_layer()
    if read is None or others is None:
        return lambda name: name not in own
    return (read | others - own).__contains__


_ABSENT = object()


def _inside(value: Any) -> list[Any]:
    """The elements of a list or deque; the keys and values of a dict."""
    if type(value) is list:
        return value
    if type(value) is collections.deque:
        return [*value]
    return [*value, *value.values()] if type(value) in _DICTS else []


def _without_graph(value: Any) -> Any:
    return None if isinstance(value, paddle.Tensor) and not value.is_leaf else value
