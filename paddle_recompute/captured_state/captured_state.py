"""The captured state of a function: what it reads besides its arguments, restored for the second
forward.

The second forward must read the objects that the first one read. Between the two, a loop may rebind
a variable of the closure, or a sublayer, parameter, attribute or global may be replaced.
`CapturedState` records each such *location* and its content. During the second forward the changed
locations have their old content, afterwards the new one.

**What is searched.** The function, its ``__self__``, its closure, its defaults, and the attributes
and globals that it names; from there functions, partials, methods, lists, deques, tuples, sets,
dicts and hooks; those attributes of plain objects, at any depth, that the code looks up by name
(all attributes if code outside of Layers uses ``getattr``); Layers with their sublayers, parameters
and attributes. The search ends after `MAX_OBJECTS` objects and skips containers of more than
`MAX_CONTAINER_ITEMS` items, which hold data. Objects of libraries and of Python itself (locks,
barriers, loggers) are skipped. A Layer that the search cannot find (behind an import inside the
function, an attribute of a class, a weak reference) is added when the first forward calls it.

**State that the forward itself changes.** Attributes and items that it assigns get their old value
back, except numbers, text and containers of data, and except Layers and parameters that it builds
where none was. An object's numbers are restored, too, if the forward rebinds a tensor or Layer of
it, or if it is a Layer with buffers: they may be the length of a cache. So a cache (keys and values
of attention) is filled a second time; a plain counter counts both forwards.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import operator
import types
import weakref
from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle.layers import (
    STATISTICS,
    attributes_of_every_layer,
    is_initialized,
    layers_below,
)
from paddle_recompute.captured_state.captured_tensor import CapturedTensor
from paddle_recompute.captured_state.detached_values import detach_value
from paddle_recompute.captured_state.flags import CHANGED_BY, restore_flags
from paddle_recompute.captured_state.locations import (
    ABSENT,
    Attributes,
    Entries,
    Items,
    items_of,
    of_attributes,
)
from paddle_recompute.captured_state.names import (
    OURS,
    PADDLE,
    UNNAMED,
    Kind,
    Reader,
    check_paddle,
    foreign_in_paddle,
    is_deterministic,
    is_library,
    is_of_python,
    kinds_of,
    methods,
    names_in,
    nothing,
    reader_of,
)
from paddle_recompute.captured_state.snapshot import Snapshot, Undo

MAX_CONTAINER_ITEMS = 1000
"""Containers with more items hold data, not Layers; a search in them would slow down each call."""

MAX_OBJECTS = 2_000
"""The most objects that one search visits."""

_LEAVES = frozenset({int, float, str, bytes, complex, bool, type(None)})
"""Types of values that hold no other objects."""
_WITH_GRAPHS = (paddle.Tensor, tuple)
"""Types of values that `detach_value` may replace."""
_STATISTICS_NAMES = frozenset({*STATISTICS, "_use_global_stats", "eval", "train", "training"})
"""Names in code that may read the statistics of a BatchNorm, or switch it during a forward to eval
mode, in which its kernel reads them.
"""
_MODULES_WITHOUT_RNG = {"builtins", "math", "operator", "_operator", "functools"}
"""Modules whose functions draw no random numbers."""
_hook_dicts = operator.itemgetter("_forward_pre_hooks", "_forward_post_hooks")
_DICT_ITEMS = Reader((), lambda value: (*items_of(value),), None)
_LIST_ITEMS = Reader((), tuple, None)
_NOTHING = Reader((), nothing, frozenset())
_RECORDS = (types.SimpleNamespace, argparse.Namespace)
"""Classes of the standard library whose attributes are a user's objects."""


def layers_of(function: Any, arguments: Any) -> list[paddle.nn.Layer]:
    """The Layers that a call of `function` with `arguments` can reach.

    A sublayer may be missing from the result if the Layer that contains it is there.
    """
    return list(_Search.of(function, arguments).layers.values())


def read_by(functions: tuple[Any, ...]) -> tuple[frozenset[str] | None, set[str], Snapshot]:
    """Search the code that runs when `functions` are called, without Paddle's own.

    Returns:
        The names of the attributes that the code looks up (None: any), its string constants, and
        the captured state.
    """
    search = _Search.of(functions, ())
    texts: set[str] = set()
    for value in search._seen.values():
        if type(value) is types.FunctionType:
            texts |= names_in(value.__code__).texts
    return None if search._any_name else frozenset(search.names), texts, search.snapshot


class CapturedState:
    """The captured state of one call of `function`; construct it before the first forward.

    Attributes:
        snapshot: The locations with their content, and all Layers.
        may_draw: Whether the call may draw from NumPy's stream or Python's, as far as the search
            has seen its code; a Layer that `add_called` adds may draw, too.
        may_seed: Whether it may seed a stream.
        reads_statistics: Whether code of the user may read the statistics of a BatchNorm, or switch
            it to eval mode.
        may_change_flags: Whether it may change ``stop_gradient`` of tensors.
        is_settled: Whether a new search right after the first forward would find the same state.
    """

    __slots__ = (
        "_captured", "_checked", "_found", "_search", "is_settled", "may_change_flags", "may_draw",
        "may_seed", "reads_statistics", "snapshot",
    )  # fmt: skip

    def __init__(self, function: Any, arguments: Any) -> None:
        search = _Search.of(function, arguments)
        self.snapshot = search.snapshot
        self.may_draw, self.may_seed = search.may_draw, search.may_seed
        self.reads_statistics = search.reads_statistics
        self.may_change_flags = search.may_change_flags
        self._captured = search.tensors
        # Those that must be unchanged at the backward: the first forward has not written to them.
        self._checked = search.tensors
        self._search: _Search | None = search
        self._found: AbstractSet[int] | None = None

    def add_called(self, layer: paddle.nn.Layer) -> None:
        """Add the state of `layer`, which the first forward calls and the search did not find."""
        if (search := self._search) is None:  # this call uses the captured state of an earlier one
            self.snapshot.add_flags(layers_below(layer))
            return
        if self._found is None:
            self._found = search.found()
        search._visit(layer, "")
        search._look_up_names()
        self.reads_statistics = search.reads_statistics
        self.may_change_flags = search.may_change_flags

    def after_forward(self) -> None:
        """Accept the changes of the first forward that are not restored: see the module."""
        search, found = self._search, self._found
        self._search = self._found = None  # it refers to tensors with their graphs
        is_unchanged = self.snapshot.after_forward(
            self.snapshot.found if search is None else lambda: found or search.found()
        )
        self.is_settled = is_unchanged and not self.may_change_flags
        if self._checked:
            self._checked = [tensor for tensor in self._checked if not tensor.is_written()]

    def restore(self, undo: Undo) -> None:
        """Give every location its content from before the first forward; `undo` gets functions that
        revert this.

        Raises:
            RecomputeError: A captured tensor was written to or released.
        """
        self.snapshot.restore(undo)
        if self._captured:
            tensors = [captured.get() for captured in self._captured]
            flags = [captured.flag for captured in self._captured]
            restore_flags(tensors, flags, undo, may_change=self.may_change_flags)
        for tensor in self._checked:  # last: restoring locations would remove the hook of `refuse`
            if tensor.is_released() or tensor.is_written():
                tensor.refuse(undo)

    def captured_with_graph(self) -> Iterator[tuple[str, paddle.Tensor]]:
        """The captured tensors that have a graph and still exist, with the names that hold them."""
        for captured in self._checked:
            tensor = captured.with_graph() if captured.with_graph is not None else None
            if tensor is not None and not tensor.stop_gradient:
                yield captured.name, tensor


class _Search:
    """The search for the captured state of a function.

    It is a class, because a recursive closure would be a reference cycle that keeps the Layers.
    """

    def __init__(self) -> None:
        self.layers: dict[int, paddle.nn.Layer] = {}
        self.snapshot = Snapshot()
        self.may_draw = self.may_seed = self.is_dynamic = False
        self.tensors: list[CapturedTensor] = []
        # By id; the values keep the ids of temporary tuples from being reused.
        self._seen: dict[int, Any] = {}
        # Each with the names already looked up in it.
        self._objects: list[tuple[Any, set[str]]] = []
        self.names: set[str] = set(UNNAMED)
        # Code outside of Layers computes a name (``getattr``): visit all attributes of objects.
        self._any_name = False
        # The Layer being visited; the same, but None while its methods or hooks are visited.
        self._layer_of_code: paddle.nn.Layer | None = None
        self._layer_of_attribute: paddle.nn.Layer | None = None
        self._kinds: dict[type, Kind] = {}
        self._names_read_outside: dict[int, set[str]] = {}  # by the id of a Layer or `Kind`

    @classmethod
    def of(cls, function: Any, arguments: Any) -> _Search:
        """Search the state that a call of `function` with `arguments` reads."""
        check_paddle()
        search = cls()
        search._visit(function, "")
        if arguments:
            for path, leaf in _nested.named_leaves(arguments):
                if not _nested.is_tensor(leaf):
                    search._visit(leaf, path)
        search.may_draw |= bool(search._objects)
        if search._objects or len(search.names) > len(UNNAMED):
            search._look_up_names()
        return search

    def found(self) -> AbstractSet[int]:
        """The ids of what was found so far."""
        return self._seen.keys() | self.snapshot.found()

    @property
    def reads_statistics(self) -> bool:
        """See `CapturedState`."""
        return self.is_dynamic or not self.names.isdisjoint(_STATISTICS_NAMES)

    @property
    def may_change_flags(self) -> bool:
        """See `CapturedState`."""
        return self.is_dynamic or not self.names.isdisjoint(CHANGED_BY)

    def _visit(self, value: Any, name: str) -> None:
        """Visit `value` and its content; `name` is the variable that holds it."""
        kind = type(value)
        if kind in _LEAVES:
            return
        if id(value) in self._seen:
            if self.tensors and self._layer_of_attribute is not None:
                self._share(value)
            return
        if kind in weakref.ProxyTypes:
            with contextlib.suppress(ReferenceError):  # the object was freed
                self._visit(value.__sizeof__.__self__, name)  # the object behind the proxy
            return
        if len(self._seen) >= MAX_OBJECTS:
            self.may_draw = True
            return
        self._seen[id(value)] = value
        if kind is types.FunctionType:
            self._visit_function(value)
        elif issubclass(kind, paddle.nn.Layer):
            self.layers[id(value)] = value
            self._visit_layer(value)
        elif issubclass(kind, paddle.Tensor):
            if is_initialized(value):
                self.tensors.append(CapturedTensor(value, name, self._layer_of_attribute))
        elif issubclass(kind, (list, tuple, set, frozenset, dict, deque)):
            if len(value) <= MAX_CONTAINER_ITEMS:
                self._visit_container(value, name)
            else:
                self.may_draw = True
        elif kind is types.MethodType:
            self._visit(value.__self__, name)
            self._visit(value.__func__, name)
        elif issubclass(kind, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._visit(part, name)
        elif issubclass(kind, types.ModuleType):
            if not is_library(value.__name__) and not is_of_python(value.__name__):
                self._objects.append((value, set()))
            self.may_draw |= value not in PADDLE and not is_deterministic(value.__name__)
        elif issubclass(kind, _RECORDS) or _is_user_class(kind):
            self._objects.append((value, set()))
        else:
            self.may_draw |= getattr(value, "__module__", "") not in _MODULES_WITHOUT_RNG

    def _share(self, value: Any) -> None:
        """Two Layers hold `value`, so its tensors have no single owner."""
        held = {id(leaf) for leaf in _nested.leaves_of(value)}
        for captured in self.tensors:
            if captured.owner is not self._layer_of_attribute and captured.identity in held:
                captured.owner = None

    def _visit_container(self, value: Any, name: str) -> None:
        is_recorded = isinstance(value, (list, deque, dict))
        items = items_of(value) if is_recorded else value
        reader = _DICT_ITEMS if isinstance(value, dict) else _LIST_ITEMS
        if _LEAVES.issuperset(map(type, items)):
            if is_recorded:
                self.snapshot.add(value, reader, (*items,))
            return
        if is_recorded:
            held = [detach_value(item) for item in items]
            if all(map(operator.is_, held, items)):
                self.snapshot.add(value, reader, (*items,))
            else:
                self.snapshot.locations.append(Items(value, held))
        for item in value.values() if isinstance(value, dict) else value:
            self._visit(item, name)

    def _record(self, entries: Any, reader: Reader) -> None:
        """Record entries of a dict, and visit their values."""
        values = reader.read(entries)
        if self._visit_values(reader, values):
            self._record_with_graphs(entries, reader, values)
        elif reader.names:
            self.snapshot.add(entries, reader, values)

    def _visit_values(self, reader: Reader, values: tuple[Any, ...]) -> bool:
        """Visit each value; returns whether one is a tensor with a graph."""
        has_graph = False
        for name, value in zip(reader.found, values, strict=True):
            if (kind := type(value)) not in _LEAVES:
                has_graph |= issubclass(kind, _WITH_GRAPHS) and detach_value(value) is not value
                self._visit(value, name)
        return has_graph

    def _record_with_graphs(self, entries: Any, reader: Reader, values: tuple[Any, ...]) -> None:
        found, _, names = reader
        assert names is not None
        held = {name: detach_value(value) for name, value in zip(found, values, strict=True)}
        self.snapshot.locations.append(Entries(entries, names, held, len(entries)))

    def _visit_function(self, function: types.FunctionType) -> None:
        module = function.__globals__.get("__name__")
        if is_library(module):
            self.may_draw |= not is_deterministic(function.__module__)
            return
        code = function.__code__
        names = names_in(code)
        self.names |= names.attributes
        self._any_name |= names.is_dynamic and self._layer_of_code is None
        self.may_seed |= names.may_seed
        if function.__dict__:
            self._record(function.__dict__, reader_of(function.__dict__, names.attributes))
        defaults = function.__defaults__, function.__kwdefaults__
        if any(defaults):
            names_of_defaults = ("__defaults__", "__kwdefaults__")
            self.snapshot.locations.append(of_attributes(function, names_of_defaults, defaults))
            for values in defaults:
                self._visit(values, code.co_name)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell that is still empty
                content = cell.cell_contents
                self.snapshot.locations.append(of_attributes(cell, ("cell_contents",), (content,)))
                self._visit(content, variable)
        if str(module).partition(".")[0] != OURS:
            self.is_dynamic |= names.is_dynamic
            self.may_draw |= names.may_draw or names.is_dynamic
            self._visit_globals(function.__globals__, names.globals)
            for value in foreign_in_paddle(names.attributes):
                self._visit(value, value.__name__)

    def _visit_layer(self, root: paddle.nn.Layer) -> None:
        outer, layers = self._layer_of_code, layers_below(root)
        if self.snapshot.layers:  # some may have been visited
            layers = [layer for layer in layers if layer is root or id(layer) not in self._seen]
        self._seen.update(zip(map(id, layers), layers, strict=True))
        of_class = dict(zip(map(type, layers), layers, strict=True))
        for layer_class in of_class.keys() & self._kinds.keys():
            del of_class[layer_class]
        self._kinds.update(kinds_of(of_class))
        dicts, readers, before, with_objects = self.snapshot.add_layers(layers), [], [], []
        for index, (layer_class, entries) in enumerate(zip(map(type, layers), dicts, strict=True)):
            kind = self._kinds[layer_class]
            keys, reader = kind.last
            if keys != [*entries]:
                reader = kind.reader(entries)
            values = reader.read(entries)
            readers.append(reader)
            before.append(values)
            if not _LEAVES.issuperset(map(type, values)):
                with_objects.append(index)
        for index in with_objects:
            self._layer_of_code = self._layer_of_attribute = layers[index]
            if self._visit_values(readers[index], before[index]):
                self._record_with_graphs(dicts[index], readers[index], before[index])
                readers[index], before[index] = _NOTHING, ()
        self._layer_of_attribute = None
        self.snapshot.add_all(dicts, readers, before)
        if self.snapshot.has_hooks():
            for self._layer_of_code in layers:
                for hooks in _hook_dicts(self._layer_of_code.__dict__):
                    for hook in hooks.values():
                        self._visit(hook, "a hook")
        for layer_class, self._layer_of_code in of_class.items():
            kind = self._kinds[layer_class]
            self.may_draw |= kind.may_draw
            for method in kind.methods:
                for function in methods(layer_class, method):
                    self._visit(function, method)
        self._layer_of_code = outer

    def _look_up_names(self) -> None:
        """Visit the attributes with the names that the code looks up, in plain objects and in
        Layers, until there is no new name and no new object.
        """
        is_done = False
        while not is_done:
            is_done = not self._look_up_in_layers()
            for value, known in list(self._objects):
                new = self.names - known
                if self._any_name and not isinstance(value, types.ModuleType):
                    new |= (_nested.attributes_of(value) or {}).keys() - known
                if new:
                    known |= new
                    is_done = False
                    self._visit_object(value, frozenset(new))

    def _look_up_in_layers(self) -> bool:
        """Visit attributes of Layers that other code names; returns whether one was new."""
        if len(self.names) == len(UNNAMED):  # no code of the user
            return False
        names = self.names - UNNAMED - attributes_of_every_layer()
        unread: dict[type, AbstractSet[str]] = {}
        is_new = False
        for layer in list(self.snapshot.layers):
            layer_class, entries = type(layer), layer.__dict__
            kind = self._kinds[layer_class]
            if layer_class not in unread:
                own = kind.attributes
                unread[layer_class] = frozenset() if own is None else names - own
                known = self._names_read_outside.setdefault(id(kind), set())
                if new := (kind.other_methods & names) - known:
                    is_new = True
                    known |= new
                    self._visit_methods(layer, new)
            if not unread[layer_class].isdisjoint(entries):
                known = self._names_read_outside.setdefault(id(layer), set())
                if new := (unread[layer_class] & entries.keys()) - known:
                    is_new = True
                    known |= new
                    self._record(entries, reader_of(entries, new))
        return is_new

    def _visit_methods(self, layer: paddle.nn.Layer, names: AbstractSet[str]) -> None:
        outer, self._layer_of_code = self._layer_of_code, layer
        for name in names:
            for function in methods(type(layer), name):
                self._visit(function, name)
        self._layer_of_code = outer

    def _visit_object(self, value: Any, names: frozenset[str]) -> None:
        entries = _nested.attributes_of(value)
        if issubclass(type(value), types.ModuleType):
            self._visit_globals(value.__dict__, names)
            return
        if isinstance(entries, dict):
            self._record(entries, reader_of(entries, names))
        slots = names.intersection(_slots(type(value)))
        if slots:
            values = [Attributes(value).get(name, ABSENT) for name in slots]
            self.snapshot.locations.append(of_attributes(value, slots, values))
            for name, content in zip(slots, values, strict=True):
                self._visit(content, name)
        for name in names:
            for function in methods(type(value), name):
                self._visit(function, name)

    def _visit_globals(self, entries: dict[str, Any], names: frozenset[str]) -> None:
        """Record the globals that exist now; globals that are added later are ignored."""
        self._record(entries, reader_of(entries, names & entries.keys()))


def _is_user_class(kind: type) -> bool:
    module = str(kind.__module__)
    if module.partition(".")[0] == OURS:
        return False  # our own objects must see both forwards, such as the planner's recorder
    return not (issubclass(kind, type) or is_library(module) or is_of_python(module))


def _slots(kind: type) -> list[str]:
    """The names of the slots as the class stores them: private ones mangled."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        found.update(vars(base))
    return [name for name, value in found.items() if type(value) is types.MemberDescriptorType]
