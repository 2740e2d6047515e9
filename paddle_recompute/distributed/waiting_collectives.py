"""Collectives of a device that wait for a rank that is gone.

A collective of a device is put on a stream and the host goes on, until it reads a tensor that the
collective has to make: then it waits inside the driver, where nothing can reach it. So the thread
that hears of the other ranks looks at the collectives that have begun. Where one of them waits in
vain, the run has failed, which ends a process that does not notice (`connection`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from paddle_recompute._paddle import device
from paddle_recompute.distributed.connection import Watched, all_watched, peers
from paddle_recompute.distributed.peer_state import Scope


@contextlib.contextmanager
def watched_on_device(what: str, scope: Scope) -> Iterator[None]:
    """Inside, collectives of a device are begun; the run fails if one of them cannot complete.

    Args:
        what: Names them, for messages.
        scope: The ranks that take part.

    Raises:
        PeerError: A rank is known to be gone already.
    """
    peers().check(scope, what)
    watched = Watched(what, scope)
    all_watched.add(watched)
    try:
        yield
    except BaseException:
        all_watched.discard(watched)
        raise
    watched.enqueued = device.event_now()
