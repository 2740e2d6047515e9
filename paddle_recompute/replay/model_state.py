"""What a forward and backward can change of a model: captured, isolated for one run, put back.

A run `ModelState.isolated` sees the model's values and leaves no trace: it reads leaves of its own
in place of the trained parameters, so that no ``.grad``, hook or collective takes part, and copies
of the buffers. `ModelStamp` tells cheaply whether the model is still the one that was stamped.
"""

from __future__ import annotations

import collections
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import paddle

from paddle_recompute._paddle.layers import (
    SUBLAYERS_AND_HOOKS,
    attributes_of_every_layer,
    forward_post_hooks,
    forward_pre_hooks,
    is_initialized,
    non_trained_state,
    own_sublayers,
)
from paddle_recompute._paddle.writes import address_of
from paddle_recompute.replay.names import kind_of
from paddle_recompute.replay.random_streams import RngState
from paddle_recompute.replay.reach import read_by

_DICTS = (dict, collections.OrderedDict)
_CONTAINERS = (*_DICTS, list, set, collections.deque)
_NUMBERS = (bool, int, float, complex, type(None))
_TOLD_BY_VALUE = (*_NUMBERS, str, bytes)
_members_of = itemgetter(*SUBLAYERS_AND_HOOKS)
_OWN_PREFIX = "_recompute_"
"""Attributes of wrapped Layers: a forward counts in them, and no number depends on them."""


class ModelState:
    """Attributes of all Layers (containers one level deep), buffers, ``.grad``, random streams.

    Attributes:
        trained: The parameters with a gradient, by name.
        streams: The ends of the random streams.
    """

    def __init__(self, model: paddle.nn.Layer) -> None:
        self.streams = RngState.capture()
        self.trained = {n: p for n, p in model.named_parameters() if not p.stop_gradient}
        # Of a sparse gradient too. `_set_grad_type` empties the tensor itself, so not that one.
        self._gradients = [(p, p.grad.detach()) for p in model.parameters() if p.grad is not None]
        self._layers = [
            (name, layer, dict(vars(layer)))
            for name, layer in model.named_sublayers(include_self=True)
        ]
        self._others: dict[int, paddle.Tensor] = {}
        own = attributes_of_every_layer()
        self._contents = [
            (_joined(name, "" if attribute in own else attribute), value, copy.copy(value))
            for name, _, attributes in self._layers
            for attribute, value in attributes.items()
            if type(value) in _CONTAINERS
        ]
        self._buffers: dict[str, tuple[paddle.Tensor, dict[str, Any], str]] = {}
        for name, layer, _ in self._layers:
            for holder, keys in non_trained_state(layer):
                for key in keys:
                    if is_initialized(holder[key]):
                        self._buffers[_joined(name, str(key))] = holder[key], holder, key

    def put_back(self) -> None:
        """Let everything be as it was captured, the values of tensors apart."""
        for _, layer, attributes in self._layers:
            now = vars(layer)
            if now.keys() != attributes.keys() or any(now[k] is not attributes[k] for k in now):
                now.clear()
                now.update(attributes)
        for _, container, before in self._contents:
            container.clear()
            (container.extend if hasattr(container, "extend") else container.update)(before)
        for parameter, gradient in self._gradients:
            now = parameter.grad
            if now is None or address_of(now) != address_of(gradient):
                parameter.grad = gradient
        self.streams.restore()

    @contextlib.contextmanager
    def isolated(self, leaves: Mapping[str, paddle.Tensor]) -> Iterator[None]:
        """Inside, the model holds `leaves` in place of the parameters of these names, and copies of
        its buffers; the random streams are as captured. Afterwards everything is put back.
        """
        others = {id(self.trained[name]): leaf for name, leaf in leaves.items()}
        for tensor, _, _ in self._buffers.values():
            others.setdefault(id(tensor), clone(tensor))
        self._others = {id(tensor): tensor for tensor in others.values()}
        self.streams.restore()
        try:
            for _, container, _ in self._contents:
                if isinstance(container, dict | list):
                    _substitute(container, others)
            yield
        finally:
            self._others = {}
            self.put_back()

    def buffers(self) -> dict[str, Any]:
        """What the model now has under the name of each buffer, as a forward looks it up."""
        return {name: holder.get(key) for name, (_, holder, key) in self._buffers.items()}

    def changes(self, *, of_tensors: bool = True) -> list[str]:
        """Names of attributes and container items that hold another tensor or number than before.

        Buffers are not among them: their values are compared. One that got a gradient is. Text
        and other objects are not either, as Layers of Paddle keep notes in attributes. To be called
        inside of `isolated`.

        Args:
            of_tensors: Those that hold tensors, too.
        """
        slots = {(id(holder), key) for _, holder, key in self._buffers.values()}
        return [
            *(
                name
                for name, now, then in self._pairs(slots)
                if (of_tensors or not _is_tensor(now, then)) and self._differ(now, then)
            ),
            *(
                f"{name} (with a gradient)"
                for name, now in self.buffers().items()
                if of_tensors and isinstance(now, paddle.Tensor) and not now.stop_gradient
            ),
        ]

    def _pairs(self, slots: set[tuple[int, str]]) -> Iterator[tuple[str, Any, Any]]:
        """(name, what is there now, what was there) of each attribute and item."""
        own = attributes_of_every_layer()
        for name, layer, attributes in self._layers:
            now = vars(layer)
            for key in (now.keys() | attributes.keys()) - own:
                if not key.startswith(_OWN_PREFIX):
                    yield _joined(name, str(key)), now.get(key), attributes.get(key)
        for name, container, before in self._contents:
            if isinstance(container, dict):
                for key in container.keys() | before.keys():
                    if (id(container), key) not in slots:
                        yield _joined(name, str(key)), container.get(key), before.get(key)
            elif not isinstance(container, set):
                yield f"the length of {name}", len(container), len(before)
                for place, (one, other) in enumerate(zip(container, before, strict=False)):
                    yield f"{name}[{place}]", one, other

    def _differ(self, now: Any, then: Any) -> bool:
        if now is then or id(now) in self._others:
            return False
        if _is_tensor(now, then):
            return True
        return isinstance(now, _NUMBERS) and isinstance(then, _NUMBERS) and now != then


def _is_tensor(*values: Any) -> bool:
    return any(isinstance(value, paddle.Tensor) for value in values)


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _substitute(container: dict[Any, Any] | list[Any], others: Mapping[int, Any]) -> None:
    items = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in list(items):
        if id(value) in others:
            container[key] = others[id(value)]


@paddle.no_grad()
def clone(tensor: paddle.Tensor) -> paddle.Tensor:
    """A leaf with the values of `tensor` in memory of its own, and its ``stop_gradient``."""
    copied = tensor.detach().clone()
    copied.stop_gradient = tensor.stop_gradient
    return copied


def alias(tensor: paddle.Tensor) -> paddle.Tensor:
    """A leaf with the memory, name and ``stop_gradient`` of `tensor`, without its hooks."""
    other = tensor.detach()
    other.stop_gradient, other.name = tensor.stop_gradient, tensor.name
    return other


class ModelStamp:
    """What the forwards of a model read: classes, sublayers, hooks and attributes of its Layers;
    and what `reach` finds in plain objects, lists, dicts, globals and closures.

    Args:
        model: The model.
        code: Functions that are called beside it, such as a loss.
    """

    def __init__(self, model: paddle.nn.Layer, *code: Any) -> None:
        self._model, self._code = model, code
        self._look()

    def change(self) -> str:
        """What is not as it was at the last call, or when the stamp was made; "" if nothing.

        Where every entry is the object that it was, which is compared in C, no place is looked at.
        After a change, what came with it is watched, too.
        """
        is_rest_same = all(place.is_unchanged() for place in self._rest)
        if is_rest_same and all(map(is_, self._entries_now(), self._seen)):
            return ""
        then = self._held
        self._look()
        for place in {**then, **self._held}:
            label, one = then.get(place, ("", _ABSENT))
            label, other = self._held.get(place, (label, _ABSENT))
            is_equal = type(one) is type(other) and isinstance(one, _TOLD_BY_VALUE) and one == other
            if one is not other and not is_equal:
                return label
        return "" if is_rest_same else "a variable of a closure"

    def _look(self) -> None:
        """Look at all that the model reaches now."""
        names, texts, found = read_by((self._model, *self._code))
        self._layers, self._rest = found.layers, found.places
        self._dicts = [*map(vars, self._layers)]
        known = {id(one): name for name, one in self._model.named_sublayers(include_self=True)}
        paths = [known.get(id(one)) or type(one).__name__ for one in self._layers]
        places: list[tuple[str, dict[Any, Any], Callable[[Any], bool] | None]] = []
        """Label, dict and which of its keys matter; None: all."""
        for layer, name in zip(self._layers, paths, strict=True):
            label = "{}" if layer is self._model else f"{name}.{{}}"
            places.append((label, vars(layer), _read_by(layer, names)))
            places.append((label, own_sublayers(layer), None))
            if layer is not self._model:  # whose own hooks run around its Program, not in it
                for hooks in (forward_pre_hooks(layer), forward_post_hooks(layer)):
                    places.append((f"the hooks of {name}", hooks, None))
        inner, named = {}, set()
        own = {id(one) for entries in self._dicts for one in entries.values()}
        for container, read in found.beside_layers():
            if read is not None:
                places.append(("{}", container, read.__contains__))
            elif type(container) in _DICTS and id(container) not in own:
                # It may count steps, too: what matters are the keys that the code names.
                places.append(("{}", container, lambda key: type(key) is not str or key in texts))
                named.add(id(container))
            else:
                inner[id(container)] = container
        self._entries = [entries for _, entries, _ in places]
        self._whole = [entries for _, entries, matters in places if matters is None]
        self._read: dict[itemgetter[Any], dict[Any, Any]] = {}
        for _, entries, matters in places:
            if matters is not None and (keys := [*filter(matters, entries)]):
                self._read[itemgetter(*keys, keys[0])] = entries  # of one key it gives no tuple
        inner |= {id(one): one for one in self._values_now() if type(one) in (list, *_DICTS)}
        self._containers = [one for key, one in inner.items() if key not in named]
        # Not a tensor with its graph: where there is one, each place is looked at each time.
        self._seen = [*map(_without_graph, [*self._entries_now()])]
        self._held = {
            (id(entries), key, at): (label.format(key), _without_graph(one))
            for label, entries, matters in places
            for key, value in [*entries.items()]
            if matters is None or matters(key)
            for at, one in enumerate([value, *_inside(value)])
        }
        for layer, name in zip(self._layers, paths, strict=True):
            self._held[id(layer), "", 0] = f"the class of {name}", type(layer)
        for container in self._containers:
            for at, one in enumerate(_inside(container)):
                self._held[id(container), "", at] = "an item of a list or dict", _without_graph(one)

    def _entries_now(self) -> Iterator[Any]:
        """Classes and dicts of all Layers; all keys, and values and what is in lists and dicts as
        far as they matter; and `_ABSENT`, so that the shorter of two such is not the beginning of
        the other.
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
