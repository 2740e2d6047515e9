"""JSON files that strangers may have written: read within limits, or refused with one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

LARGEST = 64 << 20
"""Bytes of a file that is read, unless the caller says otherwise."""


def read_json(path: Path, *, largest: int = LARGEST) -> Any:
    """What a JSON file of at most `largest` bytes holds; numbers are finite.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no such file; the message says why, in a few words.
    """
    with path.open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"larger than {largest} bytes")
    return parse_json(content)


def parse_json(content: bytes | str) -> Any:
    """The value that `content` stands for; numbers are finite.

    Raises:
        ValueError: It is none; the message says why, in a few words.
    """
    try:
        return json.loads(content, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason}") from None
    except MemoryError:
        raise ValueError("needs more memory than there is") from None


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"a number as large as {digits[:20]}")
    return number
