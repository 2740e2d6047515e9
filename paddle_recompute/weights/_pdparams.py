"""A reader of ``.pdparams`` files that allows arrays and nothing else.

Such a file is a pickle: a small program that may name any function of the reader's Python and call
it. This reader runs that program on a machine of its own, where nothing can be named. The dozen
names that `paddle.save` writes stand for the placeholders below, and any other name ends the
reading before it is looked up. So no code of a stranger runs, whatever the file says.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from paddle_recompute.errors import CheckpointError

_ARRAY = "an array"
_DTYPE = "a type of numbers"
_NAMES = {
    "numpy.ndarray": _ARRAY,
    "numpy.dtype": _DTYPE,
    **{
        f"numpy.{core}.multiarray.{name}": name
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    },
    **{f"numpy.{core}.numeric._frombuffer": "_frombuffer" for core in ("core", "_core")},
    "builtins.tuple": "tuple",  # a Tensor is written as ("name", array)
    "__builtin__.tuple": "tuple",
    "collections.OrderedDict": "dict",
    "_codecs.encode": "bytes",  # how protocols 0 to 2 write bytes
    "__builtin__.bytes": "no bytes",
    "builtins.bytes": "no bytes",
}
_NUMBERS = re.compile(r"[<>=|]?[biuf]\d{1,2}")
_DEEPEST = 8
_TABLE = "StructuredToParameterName@@"  # Paddle's own names, beside the structured ones
_SLICED = "UnpackBigParamInfor@@"
# What the steps of the machine raise on bytes that are no pickle of arrays. Seen on 20,000 files
# with changed bytes (tests/weights/test_pdparams.py).
_DAMAGED = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)


class _RunsCodeError(Exception):
    """The file names what no file of arrays has."""


class _Named:
    """One of the names that are allowed. It is never looked up."""

    __slots__ = ("meaning",)

    def __init__(self, meaning: str) -> None:
        self.meaning = meaning


class _Dtype:
    __slots__ = ("dtype",)

    def __init__(self, code: Any) -> None:
        if not _NUMBERS.fullmatch(_checked(code, str)):
            raise ValueError(f"numbers of the type {code[:20]!r}")
        self.dtype = np.dtype(code)

    def set_state(self, state: Any) -> None:
        order = _checked(state, tuple)[1]
        if order not in ("<", ">", "=", "|"):
            raise ValueError(f"bytes in the order {order!r}")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    __slots__ = ("array",)

    def __init__(self) -> None:
        self.array: NDArray[Any] | None = None

    def set_state(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = _checked(state, tuple)
        if not all(type(size) is int and size >= 0 for size in _checked(shape, tuple)):
            raise ValueError(f"a shape {shape!r}")
        kind = _checked(dtype, _Dtype).dtype
        if len(_checked(data, bytes)) != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{len(data)} bytes for an array of the shape {shape}")
        numbers = np.ndarray(shape, kind, data, order="F" if is_fortran else "C")
        self.array = numbers.astype(kind.newbyteorder("="), copy=False)


class _Bounded:
    """A file that is never asked for more than it has: a pickle may announce 2**60 bytes."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self, count: int) -> bytes:
        if not 0 <= count <= self._left:
            raise EOFError(f"{count} bytes announced, {self._left} left")
        self._left -= count
        return self._file.read(count)

    def readline(self) -> bytes:
        line = self._file.readline()
        self._left -= len(line)
        return line


# Python's own, and not the one in C: that one allocates what a damaged file names (2**32 entries of
# a memo), and its steps cannot be replaced.
_Python: Any = pickle._Unpickler
_STEPS = [
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP"),
    *("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2"),
    *("LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "LIST", "EMPTY_LIST", "APPEND"),
    *("APPENDS", "DICT", "EMPTY_DICT", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL"),
    *("REDUCE", "BUILD"),
]


class _ArraysOnly(_Python):
    """The machine, with the steps that arrays need."""

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        code: _Python.dispatch[code] for code in (getattr(pickle, name)[0] for name in _STEPS)
    }

    def find_class(self, module: str, name: str) -> _Named:
        meaning = _NAMES.get(f"{module}.{name}")
        if meaning is None:
            raise _RunsCodeError(f"{module}.{name}"[:120])
        return _Named(meaning)

    def load_reduce(self) -> None:
        arguments = _checked(self.stack.pop(), tuple)
        meaning = _checked(self.stack.pop(), _Named).meaning
        self.stack.append(_MAKE[meaning](*arguments))

    dispatch[pickle.REDUCE[0]] = load_reduce

    def load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if type(made) not in (_Array, _Dtype):
            raise pickle.UnpicklingError(f"a state for {type(made).__name__}")
        made.set_state(state)

    dispatch[pickle.BUILD[0]] = load_build


def _no_call(*_: Any) -> NoReturn:
    raise pickle.UnpicklingError("an array that is made in an unknown way")


def _array(*_: Any) -> _Array:
    return _Array()


def _scalar(dtype: Any, data: Any) -> _Array:
    made = _Array()
    made.set_state((1, (), dtype, False, data))
    return made


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    made = _Array()
    made.set_state((1, shape, dtype, order == "F", bytes(_checked(data, (bytes, bytearray)))))
    return made


def _dict(items: Any = ()) -> dict[Any, Any]:
    return dict(_checked(items, list)) if items else {}


_MAKE: dict[str, Callable[..., Any]] = {
    _ARRAY: _no_call,
    _DTYPE: lambda code, *_: _Dtype(code),
    "_reconstruct": _array,
    "scalar": _scalar,
    "_frombuffer": _from_buffer,
    "tuple": lambda items: tuple(_checked(items, tuple)),
    "dict": _dict,
    "bytes": lambda text, _: _checked(text, str).encode("latin-1"),
    "no bytes": lambda: b"",
}


def read_pdparams(path: Path) -> Any:
    """What a file of `paddle.save` holds: dicts, lists, text, numbers, and arrays for Tensors.

    Args:
        path: The file. It may come from a stranger: nothing in it is run.

    Returns:
        The value; a bfloat16 Tensor is an array of uint16.

    Raises:
        CheckpointError: The file is damaged, or holds something else than arrays, which may be
            code. The message names it.
    """
    try:
        with path.open("rb") as file:
            machine = _ArraysOnly(_Bounded(file, path.stat().st_size), encoding="latin-1")
            found = machine.load()
        return _finished(found, {}, 0)
    except _RunsCodeError as error:
        raise CheckpointError(
            f"{path}: names {error}, which no file of arrays has. Such a file can run code where "
            "it is loaded by other programs; nothing of it was run here. Get the weights as "
            ".safetensors from somebody that you trust"
        ) from None
    except _DAMAGED as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: is damaged, or is not a .pdparams file ({reason})") from (
            error
        )


def weights_in(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays by name of a file that `paddle.save` has written from a ``state_dict()``.

    Raises:
        CheckpointError: As `read_pdparams`; or the file holds something else.
    """
    found = read_pdparams(path)
    if isinstance(found, dict):
        if _SLICED in found:
            raise CheckpointError(
                f"{path}: its arrays are cut into parts (paddle.save with protocol 2 or 3); load "
                "it with paddle.load and save it again with protocol=4"
            )
        found = {name: array for name, array in found.items() if name != _TABLE}
        if all(isinstance(k, str) and isinstance(v, np.ndarray) for k, v in found.items()):
            return cast("dict[str, NDArray[Any]]", found)
    raise CheckpointError(f"{path}: contains no weights, which are a dict of arrays")


def _finished(value: Any, done: dict[int, Any], depth: int) -> Any:
    """`value` with arrays in place of what stands for them; each part of it is looked at once."""
    if isinstance(value, _Array):
        if value.array is None:
            raise pickle.UnpicklingError("an array without its numbers")
        return value.array
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in done:
        return done[id(value)]
    if depth > _DEEPEST:
        raise pickle.UnpicklingError("nested too deep")
    if isinstance(value, dict):
        made: Any = {
            _checked(key, (str, int)): _finished(inner, done, depth + 1)
            for key, inner in value.items()
        }
    elif isinstance(value, list):
        made = [_finished(inner, done, depth + 1) for inner in value]
    elif isinstance(value, tuple):
        made = tuple(_finished(inner, done, depth + 1) for inner in value)
        if len(made) == 2 and isinstance(made[0], str) and isinstance(made[1], np.ndarray):
            made = made[1]  # a Tensor and its name
    else:
        raise pickle.UnpicklingError(f"a {type(value).__name__}")
    done[id(value)] = made
    return made


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise pickle.UnpicklingError(f"a {type(value).__name__} in an unexpected place")
    return value
