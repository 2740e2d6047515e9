"""The types of values that fields of several sections have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from paddle_recompute.errors import ConfigError
from paddle_recompute.options import byte_count

Probability = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Width = Annotated[int, Field(ge=1, le=2**20)]
"""Features of a layer; the widest published models have some 10,000."""
_LONGEST_PATH = 4096


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError("value should be a path, in quotes where it is a number, as in '5'")
    text = str(value)
    if len(text) > _LONGEST_PATH or not text.isprintable():
        raise ValueError(
            f"value should be a path of at most {_LONGEST_PATH} characters, all of them printable"
        )
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ValueError(f"value should be a path; there is no user {text.split('/')[0]}") from None


UserPath = Annotated[Path, BeforeValidator(_path)]


def _bytes(value: Any) -> Any:
    """The whole number of bytes that ``"1.5GiB"`` stands for; a number is one of bytes."""
    if not isinstance(value, str):
        return value
    try:
        return byte_count(value)
    except ConfigError as error:
        raise ValueError(
            "value should be a number of bytes, or one with a unit (B, KiB, MiB, GiB, TiB) as in "
            "2GiB"
        ) from error


ByteCount = Annotated[int, Field(ge=1, le=2**63 - 1), BeforeValidator(_bytes)]
