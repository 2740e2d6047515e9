"""The types of values that fields of several sections have."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from paddle_recompute.errors import ConfigError

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_MOST_DIGITS = 20
_AMOUNT = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")

Probability = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Width = Annotated[int, Field(ge=1, le=2**20)]
"""Features of a layer; the widest published models have some 10,000."""
_LONGEST_PATH = 4096


def _path(value: Path) -> Path:
    text = str(value)
    if len(text) > _LONGEST_PATH or not text.isprintable():
        raise ValueError(
            f"value should be a path of at most {_LONGEST_PATH} characters, all of them printable"
        )
    try:
        return value.expanduser()
    except RuntimeError:
        raise ValueError(f"value should be a path; there is no user {text.split('/')[0]}") from None


UserPath = Annotated[Path, Field(strict=False), AfterValidator(_path)]


def _bytes(value: Any) -> Any:
    """The whole number of bytes that ``"1.5GiB"`` stands for; a number is one of bytes."""
    if isinstance(value, str):
        amount = _AMOUNT.fullmatch(value.strip())
        if amount is None:
            raise ValueError(
                "value should be a number of bytes, or one with a unit (B, KiB, MiB, GiB, TiB) "
                "as in 2GiB"
            )
        if len(amount[1]) > _MOST_DIGITS:
            raise ValueError(f"value should be a number of at most {_MOST_DIGITS} digits")
        return int(float(amount[1]) * _UNITS[amount[2]])
    return value


def byte_count(text: str) -> int:
    """The number of bytes that ``"1.5GiB"`` stands for.

    Raises:
        ConfigError: It stands for none.
    """
    try:
        return int(_bytes(text))
    except ValueError as error:
        raise ConfigError(f"{text!r} is no number of bytes: {error}") from error


ByteCount = Annotated[int, Field(ge=1, le=2**63 - 1), BeforeValidator(_bytes)]
