"""The names that the code of a function or class uses; the search skips all others."""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import paddle

from paddle_recompute._paddle.layers import attributes_of_every_layer

_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR"}
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"}
_DYNAMIC = {"getattr", "vars", "attrgetter", "__dict__", "__getattribute__"}
_LIBRARIES = {"paddle", "numpy"}
_OF_PYTHON = sys.stdlib_module_names
UNNAMED = frozenset(
    {"__call__", "__getitem__", "__iter__", "__getattr__", "__len__", "__enter__", "__contains__"}
)
"""Attributes that code looks up without naming them."""


@dataclass(frozen=True)
class Names:
    """The names that a piece of code looks up or assigns to.

    Attributes:
        globals: Names of globals.
        attributes: Names of attributes, of any object.
        is_dynamic: Whether it may look up others, by ``getattr`` and the like.
    """

    globals: frozenset[str]
    attributes: frozenset[str]
    is_dynamic: bool


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> Names:
    """The names that `code` and the functions inside it use."""
    found_globals, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _ATTRIBUTES:
            attributes.add(instruction.argval)
        elif instruction.opname in _GLOBALS:
            found_globals.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            found_globals |= inner.globals
            attributes |= inner.attributes
    is_dynamic = not _DYNAMIC.isdisjoint(found_globals | attributes)
    return Names(frozenset(found_globals), frozenset(attributes), is_dynamic)


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


@dataclass(frozen=True)
class ForwardNames:
    """The names that the forward of a Layer class looks up; no reference to the class is kept.

    Attributes:
        methods: The methods of the class that its forward uses, Paddle's own excepted.
        attributes: The attributes of the Layer that they may look up; None: any.
    """

    methods: tuple[str, ...]
    attributes: frozenset[str] | None


_known: weakref.WeakKeyDictionary[type, ForwardNames] = weakref.WeakKeyDictionary()


def forward_names(layer_class: type) -> ForwardNames:
    """The names that ``forward`` and the methods it names look up."""
    known = _known.get(layer_class)
    if known is not None:
        return known
    waiting, done = ["forward"], {"forward"}
    attributes, of_the_user, is_dynamic = {"forward"}, [], False
    while waiting:
        name = waiting.pop()
        for function in methods(layer_class, name):
            names = names_in(function.__code__)
            attributes |= names.attributes
            is_dynamic |= names.is_dynamic
            waiting += names.attributes - done
            done |= names.attributes
            if not is_library(function.__module__):
                of_the_user.append(name)
    found = ForwardNames(
        tuple(dict.fromkeys(of_the_user)),
        None if is_dynamic else frozenset(attributes - attributes_of_every_layer()),
    )
    return _known.setdefault(layer_class, found)


def is_library(module_name: object) -> bool:
    """Whether the module belongs to Paddle or NumPy, which hold no Layer of a user."""
    return isinstance(module_name, str) and module_name.partition(".")[0] in _LIBRARIES


def is_of_python(module_name: object) -> bool:
    """Whether the module belongs to Python's standard library."""
    return isinstance(module_name, str) and module_name.partition(".")[0] in _OF_PYTHON
