"""What a function reaches besides its arguments: recorded before the first forward, restored in
the second.

The second forward must reach the objects that the first one reached. Meanwhile a loop may have
rebound a variable of the closure, or a sublayer, parameter, attribute or global may have been
replaced. `Reach` records each such *place* and its content. During the second forward the changed
places hold their old content again, afterwards the new one.

**What is searched.** The function, its ``__self__``, its closure, defaults and the globals that it
names; from there functions, partials, methods, lists, tuples, sets, dicts and hooks; of plain
objects at any depth, the attributes that the code found so far looks up by name (all attributes if
it uses ``getattr``); Layers with their sublayers, parameters and attributes. The search ends after
`MOST_SEARCHED` objects and skips containers of more than `LONGEST_SEARCHED` items, which hold data.
Objects of libraries and of Python itself (locks, barriers, loggers) are skipped.

**What the forward itself changes.** A number that it rebinds and a list or dict of data that it
changes stay as they are: a counter counts both forwards. A Layer, tensor, None or other object that
it rebinds is put back, with the numbers beside it, and so is a list or dict of such objects. So a
cache that it filled (keys and values of attention) is filled again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle.layers import (
    attributes_of_every_layer,
    forward_post_hooks,
    forward_pre_hooks,
    is_parameter,
    own_parameters,
    own_sublayers,
)
from paddle_recompute.errors import RecomputeError
from paddle_recompute.replay import writes as _writes
from paddle_recompute.replay.names import (
    UNNAMED,
    forward_names,
    is_library,
    is_of_python,
    methods,
    names_in,
)
from paddle_recompute.replay.places import (
    Cell,
    Defaults,
    Entries,
    Globals,
    Items,
    Members,
    Place,
)

LONGEST_SEARCHED = 1000
"""Containers with more items hold data, not Layers; a search in them would slow down each call."""

MOST_SEARCHED = 2_000
"""The most objects that one search visits."""

_LEAVES = frozenset({int, float, str, bytes, complex, bool, type(None), types.BuiltinFunctionType})
_RECORDS = (types.SimpleNamespace, argparse.Namespace)
"""The objects of Python's library that hold a user's objects."""
_OURS = "paddle_recompute"


def layers_of(function: Any, arguments: Any) -> list[paddle.nn.Layer]:
    """The Layers that a call of `function` with `arguments` can reach.

    A sublayer may be missing from the result if the Layer that contains it is there.
    """
    return list(_Search.of(function, arguments).layers.values())


def names_read(layer: paddle.nn.Layer) -> frozenset[str] | None:
    """The names of attributes that the code looks up which a call of `layer` reaches, without that
    of Paddle; None: any.
    """
    search = _Search.of(layer, ())
    return None if search._any_name else frozenset(search._names)


class Reach:
    """What one call of `function` reaches; construct it before the first forward.

    Attributes:
        layers: The Layers; sublayers may be missing, as in `layers_of`.
    """

    def __init__(self, function: Any, arguments: Any) -> None:
        search = _Search.of(function, arguments)
        self.layers = list(search.layers.values())
        self._places = search.places
        self._tensors = search.tensors

    def after_forward(self) -> None:
        """Accept what the first forward changed itself: see the module."""
        for place in self._places:
            place.after_forward()
        self._tensors = [tensor for tensor in self._tensors if not tensor.is_written()]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, every place has its content of before the first forward.

        Raises:
            RecomputeError: A tensor that the function reaches was written to meanwhile.
        """
        with contextlib.ExitStack() as stack:
            for place in self._places:
                undo = place.put_back()
                if undo is not None:
                    stack.callback(undo)
            for tensor in self._tensors:  # after the places: `refuse` may add a hook
                if tensor.is_written():
                    tensor.refuse(stack)
            yield


class _Captured:
    """A tensor that the function reads and that is not one of its arguments.

    Attributes:
        name: The variable or attribute that holds it, or holds its list.
        owner: The Layer that holds it in another way than as parameter or buffer.
    """

    __slots__ = ("_stamp", "_tensor", "name", "owner")

    def __init__(self, tensor: paddle.Tensor, name: str, owner: paddle.nn.Layer | None) -> None:
        # Without its graph, but with its memory and version counter.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._stamp = _writes.stamp(tensor)
        self.name = name
        self.owner = owner

    def is_written(self) -> bool:
        return _writes.is_written_since(self._tensor, self._stamp)

    def refuse(self, stack: contextlib.ExitStack) -> None:
        """Raise now, or, if a Layer owns the tensor, when that Layer is called."""
        what = f"the tensor '{self.name}' ({_nested.describe(self._tensor)})"
        if is_parameter(self._tensor):
            what = f"'{self.name}', the parameter '{self._tensor.name}'"
        error = RecomputeError(
            f"{what}, which a recomputed function reaches, was changed in place between its "
            "forward and its backward, so the forward cannot be repeated. Run the backward before "
            "the change, or change a copy."
        )
        if self.owner is None:
            raise error

        def refuse(*_: object) -> None:
            raise error

        stack.callback(self.owner.register_forward_pre_hook(refuse).remove)


class _Search:
    """A walk over everything that a function reaches. It is a class because a closure that calls
    itself would be a reference cycle, which would keep the Layers alive.
    """

    def __init__(self) -> None:
        self.layers: dict[int, paddle.nn.Layer] = {}
        self.places: list[Place] = []
        self.tensors: list[_Captured] = []
        # By id, with a reference: the id of a temporary tuple would be used again.
        self._seen: dict[int, Any] = {}
        self._objects: list[tuple[Any, set[str]]] = []  # with the names looked up so far
        self._names: set[str] = set(UNNAMED)
        self._any_name = False
        self._owner: paddle.nn.Layer | None = None

    @classmethod
    def of(cls, function: Any, arguments: Any) -> _Search:
        """Search all that a call reaches."""
        search = cls()
        search._visit(function, "")
        for path, leaf in _nested.named_leaves(arguments):
            if not isinstance(leaf, paddle.Tensor):
                search._visit(leaf, path)
        search._look_up_names()
        return search

    def _visit(self, value: Any, name: str) -> None:
        """Visit `value`, which `name` holds, and its content."""
        if type(value) in _LEAVES or id(value) in self._seen:
            return
        if len(self._seen) >= MOST_SEARCHED:
            return
        self._seen[id(value)] = value
        if isinstance(value, paddle.nn.Layer):
            self.layers[id(value)] = value
            self._visit_layer(value)
        elif isinstance(value, paddle.Tensor):
            self.tensors.append(_Captured(value, name, self._owner))
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            if len(value) <= LONGEST_SEARCHED:
                self._visit_container(value, name)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, name)
            self._visit(value.__func__, name)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part, name)
        elif isinstance(value, types.ModuleType):
            if not is_library(value.__name__) and not is_of_python(value.__name__):
                self._objects.append((value, set()))
        elif isinstance(value, _RECORDS) or _is_users(value):
            self._objects.append((value, set()))

    def _visit_container(self, value: Any, name: str) -> None:
        if isinstance(value, (list, dict)):
            self.places.append(Items(value))
        for item in value.values() if isinstance(value, dict) else value:
            self._visit(item, name)

    def _visit_function(self, function: types.FunctionType) -> None:
        module = function.__globals__.get("__name__")
        if is_library(module):
            return
        code = function.__code__
        names = names_in(code)
        self._names |= names.attributes
        self._any_name |= names.is_dynamic and self._owner is None
        if function.__defaults__ or function.__kwdefaults__:
            self.places.append(Defaults(function))
            self._visit(function.__defaults__, code.co_name)
            self._visit(function.__kwdefaults__, code.co_name)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that is still empty
                content = cell.cell_contents
                self.places.append(Cell(cell, content))
                self._visit(content, variable)
        if str(module).partition(".")[0] != _OURS:
            self._visit_globals(function.__globals__, names.globals)

    def _visit_layer(self, layer: paddle.nn.Layer) -> None:
        sublayers = own_sublayers(layer)
        if sublayers:
            self.places.append(Members(layer, own_sublayers))
        if own_parameters(layer):
            self.places.append(Members(layer, own_parameters))
        outer, self._owner = self._owner, layer
        names = forward_names(type(layer))
        self._visit_attributes(layer, names.attributes)
        for method in names.methods:
            for function in methods(type(layer), method):
                self._visit(function, method)
        for find in (forward_pre_hooks, forward_post_hooks):
            self.places.append(Members(layer, find))
            for hook in find(layer).values():
                self._visit(hook, "a hook")
        self._owner = outer
        for sublayer in sublayers.values():
            if sublayer is not None and id(sublayer) not in self._seen:
                self._seen[id(sublayer)] = sublayer
                self._visit_layer(sublayer)

    def _visit_attributes(self, layer: paddle.nn.Layer, names: frozenset[str] | None) -> None:
        """Visit what a Layer holds besides parameters, buffers and sublayers."""
        entries = layer.__dict__
        if names is None:
            names = frozenset(entries) - attributes_of_every_layer()
        found = names & entries.keys()
        if names:
            self.places.append(Entries(entries, names))
        for name in found:
            self._visit(entries[name], name)

    def _look_up_names(self) -> None:
        """Look up the names in the plain objects until there is no new name and no new object."""
        is_done = False
        while not is_done:
            is_done = True
            for value, known in list(self._objects):
                new = self._names - known
                if self._any_name and not isinstance(value, types.ModuleType):
                    new |= getattr(value, "__dict__", {}).keys() - known
                if new:
                    known |= new
                    is_done = False
                    self._visit_object(value, frozenset(new))

    def _visit_object(self, value: Any, names: frozenset[str]) -> None:
        entries = getattr(value, "__dict__", None)
        if isinstance(value, types.ModuleType):
            self._visit_globals(value.__dict__, names)
            return
        if isinstance(entries, dict):
            self.places.append(Entries(entries, names))
            for name in names & entries.keys():
                self._visit(entries[name], name)
        for name in names.intersection(_slots(type(value))):
            self._visit(getattr(value, name, None), name)
        for name in names:
            for function in methods(type(value), name):
                self._visit(function, name)

    def _visit_globals(self, entries: dict[str, Any], names: frozenset[str]) -> None:
        found = [name for name in names if name in entries]
        if found:
            self.places.append(Globals(entries, found))
            for name in found:
                self._visit(entries[name], name)


def _is_users(value: Any) -> bool:
    module = type(value).__module__
    return not (isinstance(value, type) or is_library(module) or is_of_python(module))


def _slots(kind: type) -> list[str]:
    return [name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ())]
