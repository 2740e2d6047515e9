"""Groups of a device's backend, made by their members alone."""

from __future__ import annotations

import functools

from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.distributed import make_device_group
from paddle_recompute.distributed.gloo_group import number_of_group


@functools.cache
def device_group(ranks: tuple[int, ...], name: str) -> Group:
    """The group of `ranks` for the use called `name`; all of them must call this, and no others.

    What goes through groups of different names may have any order on a rank.

    Args:
        ranks: The members.
        name: The same on all of them.
    """
    return make_device_group(ranks, number_of_group(f"{ranks}/{name}"))
