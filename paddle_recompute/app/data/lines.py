"""Read files line by line, within limits; each bad line has its number and a reason."""

from __future__ import annotations

import gzip
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from paddle_recompute.errors import DataError

Parsed = TypeVar("Parsed")

LONGEST_LINE = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""The byte order marks of UTF-16, with which Excel saves "Unicode text"."""


class BadLine(Exception):
    """A line that is not what it should be; the message says why."""


def _raise(fault: str) -> NoReturn:
    raise DataError(fault) from None


def parsed(
    path: Path,
    parse: Callable[[int, Any], Parsed | None],
    refuse: Callable[[str], object] = _raise,
    max_line: int = LONGEST_LINE,
    max_file: float = math.inf,
    read: Callable[[bytes], object] = bool,
) -> Iterator[Parsed]:
    """What `parse` makes of each line of a file; where it is None, the line is left out.

    Of a file ``.json`` that begins with ``[``, its elements take the place of lines.

    Args:
        path: The file, also ``.gz``.
        parse: Called with the number of a line, from 1, and its text. It may raise `BadLine`.
        refuse: Given ``"file:line: what is wrong"`` for each line for which `parse` raises
            `BadLine`, or which is too long or not UTF-8. By default, that is a `DataError`.
        max_line: Bytes of the longest line.
        max_file: Bytes of the largest file, unpacked.
        read: Given all bytes.

    Raises:
        DataError: The file cannot be read, or is larger than `max_file` bytes.
    """
    is_list = ".json" in path.suffixes[-2:] and _begins_with_list(path, max_line)
    lines = _elements(path, max_file, read) if is_list else _lines(path, max_line, max_file, read)
    for number, line in lines:
        try:
            if not isinstance(line, bytes):
                found = parse(number, line)
            elif len(line) > max_line:
                raise BadLine(f"longer than {max_line} bytes (the limit of pairs is data.max_line)")
            else:
                found = parse(number, _decoded(line))
        except BadLine as reason:
            refuse(f"{path}:{number}: {reason}")
        else:
            if found is not None:
                yield found


def _lines(
    path: Path, max_line: int, max_file: float, read: Callable[[bytes], object]
) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers, without the byte order mark.

    Of a line that is too long there are at least `max_line` + 1 bytes.
    """
    number, size, is_rest = 0, 0, False
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            # The first line may be longer by the mark.
            while line := file.readline(max_line + 1 + len(_BYTE_ORDER_MARK) * (not number)):
                read(line)
                number += not is_rest
                size += len(line)
                if size > max_file:
                    raise DataError(
                        f"{path}:{number}: the file is larger than {max_file} bytes (data.max_file)"
                        + (", unpacked" if path.suffix == ".gz" else "")
                        + "; raise the limit if it is meant to be so large"
                    )
                if number == 1 and line.startswith(_UTF_16):
                    raise DataError(f"{path}: is UTF-16; save it as UTF-8")
                if not is_rest:
                    yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                is_rest = not line.endswith(b"\n")
    except FileNotFoundError:
        here = "" if path.is_absolute() else f" in the current folder, {Path.cwd()}"
        raise DataError(f"{path}: there is no such file{here}; correct the name") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip data after line {number} ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _begins_with_list(path: Path, max_line: int) -> bool:
    lines = _lines(path, max_line, math.inf, bool)
    return next((line for _, line in lines if line.strip()), b"").lstrip().startswith(b"[")


def _elements(
    path: Path, max_file: float, read: Callable[[bytes], object]
) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON list with their numbers, all in memory."""
    longest = min(max_file, sys.maxsize >> 1)
    content = b"".join(line for _, line in _lines(path, int(longest), max_file, read))
    try:
        found = json.loads(content, object_pairs_hook=_without_repeated_keys)
    except (ValueError, RecursionError, BadLine) as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    return enumerate(found, 1)


def _decoded(line: bytes) -> str:
    """The text of a line.

    Raises:
        BadLine: It is not UTF-8, or holds what comes of another encoding or other line ends.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(
            f"not UTF-8: {error.reason} (0x{line[error.start]:02x}) at byte {error.start + 1} of "
            "the line"
        ) from None

    if "\0" in text:
        raise BadLine("not text: holds the character NUL; save the file as UTF-8")
    if "\r" in text.strip():
        raise BadLine("a carriage return inside of the line; end lines with a line feed")
    return text


def json_object(line: Any, expected: str) -> dict[str, Any]:
    """The JSON object in a line, which has the keys `expected`; an element of a list is one.

    Raises:
        BadLine: It is none.
    """
    try:
        found = line
        if isinstance(line, str):
            found = json.loads(line, object_pairs_hook=_without_repeated_keys)
    except json.JSONDecodeError as error:
        raise BadLine(f"not JSON: {error.msg} at character {error.pos + 1} of the line") from None
    except ValueError as error:  # Python reads no number of more than 4300 digits
        raise BadLine(f"not JSON: {error}") from None
    except RecursionError:
        raise BadLine("not a pair: JSON nested too deep") from None
    if not isinstance(found, dict):
        raise BadLine(f"{kind_of(found)}, expected an object with {expected}")
    return found


def _without_repeated_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(items)
    if len(found) < len(items):
        keys = [key for key, _ in items]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise BadLine(f"key '{repeated}' appears twice")
    return found


def text_of(found: dict[str, Any], key: str) -> str:
    """The text of a key, without whitespace around it.

    Raises:
        BadLine: There is none.
    """
    if key not in found:
        raise BadLine(f"no {key}")
    if not isinstance(found[key], str):
        raise BadLine(f"{key} is {kind_of(found[key])}, expected a string")
    text = cast(str, found[key]).strip()
    if not text:
        raise BadLine(f"empty {key}")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise BadLine(f"{key} contains half of a surrogate pair (an escape \\ud800 to \\udfff)")
    return text


def kind_of(value: object) -> str:
    """The JSON name of the type of `value`."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def titled_text(found: dict[str, Any]) -> str:
    """Title and text of an object. One of them, or both, may be empty, as in some of BEIR."""
    if "text" not in found:
        raise BadLine("no text")
    given = {key: "" if found.get(key) is None else found[key] for key in ("title", "text")}
    return " ".join(text_of(given, key) for key in given if str(given[key]).strip())
