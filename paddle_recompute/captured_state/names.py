"""The names that the code of functions and classes uses; the search looks up no others."""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import paddle

from paddle_recompute._paddle.layers import attributes_of_every_layer
from paddle_recompute._paddle.rng_state import (
    DRAWING_FROM_PADDLE_ALONE,
    MODULES_BEHIND_ATTRIBUTES,
)
from paddle_recompute.captured_state.locations import FLAG

_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR"}
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"}
_DYNAMIC = {"getattr", "vars", "attrgetter", "__dict__", "__getattribute__"}
_LIBRARIES = {"paddle", "numpy", "_pytest"}  # an assert that pytest has rewritten refers to pytest
OURS = "paddle_recompute"
_OUR_WRAPPERS = "paddle_recompute._paddle"
_DRAWING = {
    *MODULES_BEHIND_ATTRIBUTES,
    "np",
    "numpy",
    "eval",
    "exec",
    "compile",
    "globals",
    "locals",
    "__import__",
}
"""Names in code that may call functions which the search cannot see, and which may draw."""
_SEEDING = {"seed", "set_rng_state", "set_cuda_rng_state", "set_state", "setstate", "manual_seed"}
"""Names of functions that seed a stream."""
_OF_PYTHON = sys.stdlib_module_names
UNNAMED = frozenset(
    {"__call__", "__getitem__", "__iter__", "__getattr__", "__len__", "__enter__", "__contains__"}
)
"""Attributes that Python looks up though the code does not name them."""


@dataclass(frozen=True)
class Names:
    """The names that a piece of code looks up or assigns to.

    Attributes:
        globals: Names of globals.
        attributes: Names of attributes, of any object.
        is_dynamic: Whether it may look up other names, by ``getattr`` and the like.
        may_draw: Whether it imports modules, or may draw from NumPy's or Python's stream.
        may_seed: Whether it may seed a stream.
        texts: Its string constants, such as keys of dicts.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    is_dynamic: bool
    may_draw: bool
    may_seed: bool
    texts: frozenset[str]


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    """The names that `code` and the functions inside it use."""
    found_globals, attributes, may_draw, may_seed = set(), set(), False, False
    for instruction in dis.get_instructions(code):
        if instruction.opname in _ATTRIBUTES:
            attributes.add(instruction.argval)
        elif instruction.opname in _GLOBALS:
            found_globals.add(instruction.argval)
        may_draw |= instruction.opname == "IMPORT_NAME"
    texts = {constant for constant in code.co_consts if type(constant) is str}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            found_globals |= inner.globals
            attributes |= inner.attributes
            may_draw |= inner.may_draw
            may_seed |= inner.may_seed
            texts |= inner.texts
    is_dynamic = not _DYNAMIC.isdisjoint(found_globals | attributes)
    may_draw |= not _DRAWING.isdisjoint(found_globals | attributes)
    may_seed |= not _SEEDING.isdisjoint(found_globals | attributes)
    return Names(
        frozenset(found_globals),
        frozenset(attributes),
        is_dynamic,
        may_draw,
        may_seed,
        frozenset(texts),
    )


def methods(kind: type, name: str) -> Iterator[types.FunctionType]:
    """The functions behind the attribute `name` of the class `kind` and of its bases."""
    for base in kind.__mro__:
        value = base.__dict__.get(name)
        if value is None or base is paddle.nn.Layer:
            continue
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        if isinstance(value, types.FunctionType):
            yield value


class Codes:
    """The recorded code of functions of classes and modules; keeps none of these alive.

    Args:
        owners: The classes and modules, each with the names that are looked up there.
    """

    __slots__ = ("_codes",)

    def __init__(self, owners: Mapping[Any, AbstractSet[str]]) -> None:
        self._codes = [
            (weakref.ref(owner), len(vars(owner)), *_codes_of(owner, names))
            for owner, names in owners.items()
        ]

    @staticmethod
    def are_current(recorded: Iterable[Codes]) -> bool:
        """Whether no function was replaced or added since they were recorded."""
        try:
            for one in recorded:
                for reference, size, read, codes in one._codes:
                    owner = reference()
                    if len(vars(owner)) != size or read(owner) != codes:
                        return False
        except (AttributeError, TypeError):
            return False
        return True


class Kind:
    """What is known from the code of a class of Layers; keeps no reference to the class.

    Attributes:
        codes: The recorded code of the functions of the class that its code names.
        methods: The methods of the class that its forward uses, without Paddle's own.
        attributes: The attributes of the Layer that they may look up; None: any.
        other_methods: The names of the other methods, without Paddle's own; code outside may call
            them.
        may_draw: Whether code outside of `methods` may draw from NumPy's or Python's stream.
        readers: Returns the `Reader` for the keys of the ``__dict__`` of a Layer.
        last: The last keys and their `Reader`.
    """

    __slots__ = (
        "_class", "attributes", "codes", "last", "may_draw", "methods", "other_methods", "readers",
    )  # fmt: skip

    def __init__(self, kind: type, forget: Callable[[object], object]) -> None:
        waiting, done = ["forward"], {"forward"}
        of_the_user: dict[str, None] = {}
        is_dynamic = self.may_draw = False
        while waiting:
            name = waiting.pop()
            for function in methods(kind, name):
                names = names_in(function.__code__)
                is_dynamic |= names.is_dynamic
                waiting += names.attributes - done
                done |= names.attributes
                if is_library(function.__module__):
                    self.may_draw |= names.may_draw or not is_deterministic(function.__module__)
                else:
                    of_the_user[name] = None
        self.methods = (*of_the_user,)
        self.other_methods = frozenset(
            name
            for base in _bases(kind)
            if not is_library(base.__module__)
            for name, value in vars(base).items()
            if type(value) in _FUNCTIONS and name not in of_the_user
        )
        self.attributes = None if is_dynamic else frozenset(done - attributes_of_every_layer())
        self.may_draw |= is_dynamic and bool(of_the_user)
        self.may_draw |= any(_hides_code(base, done) for base in _bases(kind))
        self.may_draw |= bool(foreign_in_paddle(frozenset(done)))
        self.codes = Codes(dict.fromkeys(_bases(kind), done))
        self.readers = functools.lru_cache(maxsize=64)(
            functools.partial(_reader_among, self.attributes)
        )
        self.last: tuple[list[str], Reader] = [], Reader((), nothing, frozenset())
        self._class = weakref.ref(kind, forget)

    def reader(self, entries: dict[str, Any]) -> Reader:
        """The `Reader` of `entries`, the ``__dict__`` of a Layer; call it if `last` has other
        keys.
        """
        self.last = [*entries], (reader := self.readers((*entries,)))
        return reader


def _reader_among(attributes: frozenset[str] | None, keys: tuple[str, ...]) -> Reader:
    """The `Reader` of `attributes` (None: of all) of a Layer whose ``__dict__`` has `keys`."""
    names = frozenset(keys) - attributes_of_every_layer() if attributes is None else attributes
    return reader_of(keys, names | {FLAG})


class _InPaddle:
    """The recorded code of the functions of Paddle that the known code names."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._codes = Codes({})

    def watch(self, names: AbstractSet[str]) -> None:
        """Record the functions `names`, too."""
        if not names <= self._names:
            self._names |= names
            self._codes = Codes(dict.fromkeys(PADDLE, self._names))

    def check(self) -> None:
        """Clear the cache if a function of Paddle was replaced."""
        if not Codes.are_current((self._codes,)):
            _kinds.clear()
            foreign_in_paddle.cache_clear()
            self._names, self._codes = set(), Codes({})


@functools.lru_cache(maxsize=4096)
def foreign_in_paddle(names: frozenset[str]) -> list[types.FunctionType]:
    """The functions under `names` in Paddle that other code has put there, or that may draw from
    NumPy's stream or Python's. Call `check_paddle` first.
    """
    _in_paddle.watch(names)
    values = [vars(owner)[name] for owner in PADDLE for name in names & vars(owner).keys()]
    return [
        function
        for function in values
        if type(function) is types.FunctionType
        and not (
            is_deterministic(function.__module__)
            # `functools.wraps` copies ``__module__``, not the globals
            and (
                (module := function.__globals__.get("__name__")) in _WRAPPED_BY
                or is_library(module)
            )
        )
    ]


class Reader(NamedTuple):
    """Reads the looked-up values of a dict, or all items of a container.

    Attributes:
        found: The looked-up names that the dict has; a single one twice.
        read: Reads their values.
        names: All names that are looked up; None: the items of a container are read.
    """

    found: tuple[str, ...]
    read: Callable[[Any], tuple[Any, ...]]
    names: AbstractSet[str] | None


def reader_of(entries: Container[str], names: AbstractSet[str]) -> Reader:
    """The `Reader` of the entries `names`."""
    found = (*(name for name in names if name in entries),)
    if not found:
        return Reader(found, nothing, names)
    found = found if len(found) > 1 else found * 2
    return Reader(found, itemgetter(*found), names)


def nothing(_: object) -> tuple[()]:
    """Reads no value."""
    return ()


_kinds: dict[int, Kind] = {}
_in_paddle = _InPaddle()
check_paddle = _in_paddle.check
"""Call it before `kinds_of`."""


def kinds_of(classes: Collection[type]) -> dict[type, Kind]:
    """The `Kind` of each class, made again if its code was replaced."""
    known = [*map(_kinds.get, map(id, classes))]
    if None in known or not Codes.are_current(map(_codes_of_kind, known)):
        known = [*map(kind_of, classes)]
    return dict(zip(classes, known, strict=True))  # type: ignore[arg-type]


def kind_of(layer_class: type) -> Kind:
    """The `Kind` of a class, made again if its code was replaced."""
    key = id(layer_class)
    known = _kinds.get(key)
    if known is None or not Codes.are_current((known.codes,)):
        known = _kinds[key] = Kind(layer_class, lambda _: _kinds.pop(key, None))
    return known


_codes_of_kind = attrgetter("codes")


def _bases(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if base is not paddle.nn.Layer and base is not object]


PADDLE = (paddle, paddle.nn, paddle.nn.functional, paddle.Tensor)
"""Where Paddle has the functions that code names."""


def _codes_of(owner: Any, names: AbstractSet[str]) -> tuple[Callable[[Any], Any], Any]:
    """A getter for the code of the functions `names` of `owner`, and that code."""
    entries = vars(owner)
    paths = []
    for name in names & entries.keys():
        if _is_function(entries[name]):
            paths.append(f"{name}{_FUNCTIONS[type(entries[name])]}.__code__")
        elif isinstance(entries[name], _CONSTANTS):
            paths.append(f"{name}.__class__")  # a function may replace it
    read: Callable[[Any], Any] = attrgetter(*paths) if paths else nothing
    return read, read(owner)


def _is_function(value: Any) -> bool:
    """Whether `value`, of a class or module, is a function whose code can be read."""
    attribute = _FUNCTIONS.get(type(value))
    return attribute is not None and hasattr(
        attrgetter(attribute[1:])(value) if attribute[1:] else value, "__code__"
    )


_FUNCTIONS = {
    types.FunctionType: "",
    staticmethod: "",
    classmethod: "",
    property: ".fget",
    functools.cached_property: ".func",
}
"""Types of attributes of a class that have code, and the attribute that has it."""
_CONSTANTS = (int, float, str, bytes, type(None))


def _hides_code(base: Any, names: AbstractSet[str]) -> bool:
    """Whether a call may run code of the class that `methods` does not return."""
    if is_library(base.__module__) or base.__module__.partition(".")[0] == OURS:
        return False
    return any(
        name[:2] == "__" and name not in _NOT_OF_A_CALL and callable(value)
        if _is_function(value)
        else name in names and not isinstance(value, _CONSTANTS)
        for name, value in vars(base).items()
    )


_WRAPPED_BY = {"decorator"}  # a package, which makes some of Paddle's functions (2.6, 3.x)
_NOT_OF_A_CALL = {"__init__", "__repr__", "__str__"}


@functools.lru_cache(maxsize=4096)
def is_deterministic(module: object) -> bool:
    """Whether the functions of the module draw from no other stream than Paddle's."""
    return isinstance(module, str) and module.startswith(DRAWING_FROM_PADDLE_ALONE)


@functools.lru_cache(maxsize=4096)
def is_library(module_name: object) -> bool:
    """Whether the module is of Paddle, NumPy or pytest, or wraps Paddle, and so has no Layer of a
    user.
    """
    return isinstance(module_name, str) and (
        module_name.partition(".")[0] in _LIBRARIES or module_name.startswith(_OUR_WRAPPERS)
    )


@functools.lru_cache(maxsize=4096)
def is_of_python(module_name: object) -> bool:
    """Whether the module belongs to Python's standard library."""
    return isinstance(module_name, str) and module_name.partition(".")[0] in _OF_PYTHON
