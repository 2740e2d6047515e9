"""Groups of a device's backend, made by their members alone."""

from __future__ import annotations

import functools
import zlib

from paddle.distributed.communication.group import Group

from paddle_recompute import _paddle

_FIRST_NUMBER = 2**20  # far from the numbers that Paddle counts up from 0


@functools.cache
def device_group(ranks: tuple[int, ...], name: str) -> Group:
    """The group of `ranks` for the use called `name`; all of them must call this, and no others.

    What goes through groups of different names may have any order on a rank.

    Args:
        ranks: The members.
        name: The same on all of them.
    """
    number = zlib.crc32(f"{ranks}/{name}".encode()) % 2**30 + _FIRST_NUMBER
    return _paddle.make_device_group(ranks, number)
