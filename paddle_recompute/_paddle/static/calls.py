"""The names of a recomputed Layer's calls in a Program, in either representation."""

from __future__ import annotations

from collections.abc import Collection


def name_of_call(layer: str, calls: Collection[str | None], *, continues: bool) -> str:
    """``layer`` for its first call, ``layer#2`` for its second, and so on.

    Args:
        layer: Its name.
        calls: The names that the Program's operators have.
        continues: Whether it is the next part of the last call with that name.
    """
    number = 1
    while _numbered(layer, number) in calls:
        number += 1
    return _numbered(layer, max(1, number - 1) if continues else number)


def _numbered(layer: str, number: int) -> str:
    return layer if number == 1 else f"{layer}#{number}"
