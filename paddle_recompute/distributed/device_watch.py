"""Collectives of a device that wait for a rank that is gone.

A collective of a device is put on a stream and the host goes on, until it reads a tensor that the
collective has to make: then it waits inside the driver, where nothing can reach it. So the thread
that hears of the other ranks looks at the collectives that have begun. Where one of them waits in
vain, the run has failed, which ends a process that does not notice (`control_client`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from paddle_recompute._paddle import device
from paddle_recompute._paddle.native_calls import native_call
from paddle_recompute.distributed.control_client import peers
from paddle_recompute.distributed.peer_state import Scope


class _Watched:
    """A collective that has begun."""

    def __init__(self, what: str, scope: Scope) -> None:
        self.what = what
        self.scope = scope
        self.began = time.monotonic()
        self.enqueued: Any = None
        """An event behind the collective; None while the host is still putting it on the stream,
        which can take long: at the first one the ranks connect.
        """

    def is_over(self) -> bool:
        if self.enqueued is None:
            return False
        with native_call():
            return bool(self.enqueued.query())


@contextlib.contextmanager
def watched_on_device(what: str, scope: Scope) -> Iterator[None]:
    """Inside, collectives of a device are begun; the run fails if one of them waits in vain.

    Args:
        what: Names them, for messages.
        scope: The ranks that take part.

    Raises:
        PeerError: A rank is known to be gone already.
    """
    peers().check(scope, what)
    watched = _Watched(what, scope)
    peers().watched.add(watched)
    try:
        yield
    except BaseException:
        peers().watched.discard(watched)
        raise
    watched.enqueued = device.event_now()
