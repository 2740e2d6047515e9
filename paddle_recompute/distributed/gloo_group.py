"""Gloo groups of our own, made by their members alone, in bounded time.

``dist.new_group`` has two faults that a synchronization cannot live with (Paddle 2.6.2, 3.3.1).
Every rank of the run must call it, in the same order, because each rank numbers the groups by
itself and members meet under that number: a group [0, 2] cannot be made by its members. And with
three ranks or more the making fails ("Connection refused") or hangs once in 5 to 10 times, also
where every rank does the same. Made again under another number it works, so that is done here: each
attempt has a number that only these ranks have, and a limit of time.
"""

from __future__ import annotations

import threading
import time
import zlib
from functools import partial

from paddle.distributed.communication.group import Group

from paddle_recompute._paddle import distributed as paddle_distributed
from paddle_recompute.distributed.background import Run
from paddle_recompute.distributed.control_client import Said, peers
from paddle_recompute.distributed.peer_state import Scope
from paddle_recompute.errors import SyncError

ATTEMPTS = 6
PATIENCE = 4.0
"""Seconds for the first attempt, which takes 0.6 to 1.2; each one after it has 2 more."""

_num_made: dict[tuple[tuple[int, ...], str], int] = {}


def number_of_group(text: str) -> int:
    """The number under which the members of a group meet, far from those that Paddle counts up."""
    return zlib.crc32(text.encode()) % 2**30 + 2**20


def make_gloo_group(scope: Scope, name: str) -> Group:
    """A gloo group of the ranks of `scope`, that nobody else has; all of them must call this.

    Args:
        scope: The ranks.
        name: The same on all of them; what several threads make at a time has different ones.

    Raises:
        SyncError: No attempt succeeded; the message has what each rank saw in the last one.
        PeerError: A rank has died, stopped or failed.
    """
    lane = f"making of {name}"
    made = _num_made.get((scope.ranks, name), 0) + 1
    # The main thread of another rank may wait elsewhere; it is noticed if this one tells.
    tells = threading.current_thread() is threading.main_thread()
    label = f"the making of a gloo group for {name}"
    differently = peers().meet(label, scope, made, lane=lane, tells=tells)
    if differently is not None:  # a rank has failed before it had made one
        made = max(int(said.content) for said in differently)
    _num_made[scope.ranks, name] = made
    seen: list[Said] = []
    began = time.monotonic()
    for attempt in range(ATTEMPTS):
        label = f"the making of gloo group {made} for {name}, attempt {attempt + 1}"
        text = f"{scope.ranks}/{name}/{made}/{attempt}"
        number = number_of_group(text)
        # A thread: what hangs cannot be interrupted, it is left to gloo's own limit (30 s).
        run = Run(partial(paddle_distributed.make_gloo_group, scope.ranks, number))
        run.start()
        patience = PATIENCE + 2 * attempt
        if not _ends_within(run, patience, label, scope):
            outcome = f"no answer within {patience:.0f} s"
        else:
            outcome = "" if run.error is None else str(run.error).strip().splitlines()[-1]
        told = peers().meet(f"the end of {label}", scope, outcome, lane=lane)
        seen = told or [Said(scope.ranks, outcome)]
        if not any(said.content for said in seen):
            return run.result
    last = ", ".join(
        f"rank {', '.join(map(str, said.ranks))}: {said.content or 'made'}" for said in seen
    )
    raise SyncError(
        f"gloo could not connect the ranks {', '.join(map(str, scope.ranks))} in {ATTEMPTS} "
        f"attempts and {time.monotonic() - began:.0f} s; in the last one, {last}. See that their "
        "machines reach each other on all TCP ports (GLOO_SOCKET_IFNAME names the interface), and "
        "start again."
    )


def _ends_within(run: Run[Group], seconds: float, label: str, scope: Scope) -> bool:
    deadline = time.monotonic() + seconds
    while not run.ended.wait(0.05):
        peers().check(scope, label)
        if time.monotonic() > deadline:
            return False
    return True
