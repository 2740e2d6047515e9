"""A reader of ``.pdparams`` files that allows arrays and nothing else.

Such a file is a pickle: a small program that may name any function of the reader's Python and call
it. Here a name is looked up in `_ALLOWED` and nowhere else. It holds the dozen names that
`paddle.save` writes, and functions of this module in their place. Any other name ends the reading.
So no code from the file runs, whatever it contains.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from paddle_recompute.errors import CheckpointError

_NUMBERS = re.compile(r"[<>=|]?[biuf]\d{1,2}")
_DEEPEST = 8
_TABLE = "StructuredToParameterName@@"  # Paddle's own names, beside the structured ones
_SLICED = "UnpackBigParamInfor@@"
# What the unpickler raises on bytes that are no pickle of arrays. Seen on 20,000 files with changed
# bytes (tests/fuzz/test_readers.py).
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


class _Dtype:
    __slots__ = ("dtype",)

    def __init__(self, code: Any, *_: Any) -> None:
        if not _NUMBERS.fullmatch(_checked(code, str)):
            raise ValueError(f"numbers of the type {code[:20]!r}")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        order = _checked(state, tuple)[1]
        if order not in ("<", ">", "=", "|"):
            raise ValueError(f"bytes in the order {order!r}")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    __slots__ = ("array",)

    def __init__(self, *_: Any) -> None:
        self.array: NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = _checked(state, tuple)
        if not all(type(size) is int and size >= 0 for size in _checked(shape, tuple)):
            raise ValueError(f"a shape {shape!r}")
        kind = _checked(dtype, _Dtype).dtype
        if len(_checked(data, bytes)) != math.prod(shape) * kind.itemsize:
            raise ValueError(f"{len(data)} bytes for an array of the shape {shape}")
        numbers = np.ndarray(shape, kind, data, order="F" if is_fortran else "C")
        self.array = numbers.astype(kind.newbyteorder("="), copy=False)


def _array(shape: Any, dtype: Any, order: Any, data: Any) -> _Array:
    made = _Array()
    made.__setstate__((1, shape, dtype, order == "F", data))
    return made


def _refused(*_: Any) -> NoReturn:
    raise pickle.UnpicklingError("an array that is made in an unknown way")


_ALLOWED: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": _refused,
    "numpy.dtype": _Dtype,
    "builtins.tuple": lambda items: tuple(_checked(items, tuple)),  # a Tensor: ("name", array)
    "collections.OrderedDict": lambda items=(): dict(_checked(items, (list, tuple))),
    "_codecs.encode": lambda text, _: _checked(text, str).encode("latin-1"),  # protocols 0 to 2
    "builtins.bytes": lambda: b"",
}
_ALLOWED |= {f"__builtin__.{name}": _ALLOWED[f"builtins.{name}"] for name in ("tuple", "bytes")}
for _core in ("numpy.core", "numpy._core"):
    _ALLOWED |= {
        f"{_core}.multiarray._reconstruct": _Array,
        f"{_core}.multiarray.scalar": lambda dtype, data: _array((), dtype, "C", data),
        f"{_core}.numeric._frombuffer": lambda data, dtype, shape, order: _array(
            shape, dtype, order, bytes(_checked(data, (bytes, bytearray)))
        ),
    }


class _Named:
    """One of the names that are allowed; the file can change nothing but this object."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)


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
# a memo).
_Python: Any = pickle._Unpickler


class _ArraysOnly(_Python):
    def find_class(self, module: str, name: str) -> _Named:
        if f"{module}.{name}" not in _ALLOWED:
            printable = f"{module}.{name}".encode("unicode_escape").decode()
            raise _RunsCodeError(printable[:120])
        return _Named(_ALLOWED[f"{module}.{name}"])


def read_pdparams(path: Path) -> Any:
    """What a file of `paddle.save` holds: dicts, lists, text, numbers, and arrays for Tensors.

    Args:
        path: The file. It may come from an untrusted source: nothing in it is run.

    Returns:
        The value; a bfloat16 Tensor is an array of uint16.

    Raises:
        CheckpointError: The file is damaged, or holds something else than arrays, which may be
            code. The message names it.
    """
    try:
        with path.open("rb") as file:
            bounded = _Bounded(file, path.stat().st_size)
            found = _ArraysOnly(bounded, encoding="latin-1").load()
        return _finished(found, {}, 0)
    except _RunsCodeError as error:
        raise CheckpointError(
            f"{path}: names {error}, which no file of arrays has. Such a file can run code where "
            "it is loaded by other programs; nothing of it was run here. Get the weights as "
            ".safetensors from a source that you trust"
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
