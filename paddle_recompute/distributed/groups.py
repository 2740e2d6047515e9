"""Groups of our own, made by their members alone, and gloo's in bounded time.

``dist.new_group`` has two faults that a synchronization cannot live with (Paddle 2.6.2, 3.3.1).
Every rank of the run must call it, in the same order, because each rank numbers the groups by
itself and members meet under that number: a group [0, 2] cannot be made by its members. And with
three ranks or more it fails or hangs once in 5 to 10 times (`_paddle.start`). So here each attempt
has a number that only these ranks have, and a limit of time.
"""

from __future__ import annotations

import functools
import zlib

from paddle.distributed.communication.group import Group

from paddle_recompute._paddle import distributed as paddle_distributed
from paddle_recompute._paddle.start import connected
from paddle_recompute.distributed.connection import peers
from paddle_recompute.distributed.peer_state import Scope

_num_made: dict[tuple[tuple[int, ...], str], int] = {}


@functools.cache
def device_group(ranks: tuple[int, ...], name: str) -> Group:
    """The group of `ranks` for the use called `name`; all of them must call this, and no others.

    What goes through groups of different names may have any order on a rank.

    Args:
        ranks: The members.
        name: The same on all of them.
    """
    return paddle_distributed.make_device_group(ranks, _number(f"{ranks}/{name}"))


def make_gloo_group(scope: Scope, name: str) -> Group:
    """A gloo group of the ranks of `scope`, that nobody else has; all of them must call this.

    Args:
        scope: The ranks.
        name: The same on all of them; what several threads make at a time has different ones.

    Raises:
        SyncError: No attempt succeeded; the message has what each rank saw in the last one.
        PeerError: A rank has died, stopped or failed.
    """
    made = _num_made[scope.ranks, name] = _num_made.get((scope.ranks, name), 0) + 1
    label = f"the making of gloo group {made} for {name}"
    lane = f"making of {name}"

    def agree(attempt: int, fault: str) -> str:
        said = peers().exchange(f"{label}, attempt {attempt + 1}", scope, fault, lane=lane)
        if not any(value.content for value in said):
            return ""
        return ", ".join(
            f"rank {', '.join(map(str, value.ranks))}: {value.content or 'made'}" for value in said
        )

    peers().exchange(label, scope, lane=lane)
    group: Group = connected(
        scope.ranks,
        lambda attempt: paddle_distributed.make_gloo_group(
            scope.ranks, _number(f"{scope.ranks}/{name}/{made}/{attempt}")
        ),
        agree,
        lambda: peers().check(scope, label),
    )
    return group


def _number(text: str) -> int:
    """The number under which the members of a group meet, far from those that Paddle counts up."""
    return zlib.crc32(text.encode()) % 2**30 + 2**20
