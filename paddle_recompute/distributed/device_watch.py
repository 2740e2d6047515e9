"""A thread that notices where a device collective waits for a rank that is gone.

A collective of a device is put on a stream and the host goes on, until it reads a tensor that the
collective has to make: then it waits inside the driver, where nothing can reach it. So it is not
the main thread that watches. It keeps its speed: it waits for nothing, and is asked nothing. Where
the trouble is, the run has failed, which ends a process that does not notice (`control_client`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

from paddle_recompute._paddle import device
from paddle_recompute._paddle.native_calls import native_call
from paddle_recompute.distributed.control_client import peers
from paddle_recompute.distributed.peer_state import Scope
from paddle_recompute.errors import PeerError

_POLL = 0.1


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

    def check(self) -> None:
        """Raise the `PeerError` if it will never be over, as far as is known."""
        if not self.is_over():
            peers().check(self.scope, self.what, waited=time.monotonic() - self.began)


class _Watchdog:
    def __init__(self) -> None:
        self._begun: list[_Watched] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, name="device collectives", daemon=True).start()

    def add(self, watched: _Watched) -> None:
        with self._changed:
            self._begun.append(watched)
            self._changed.notify()

    def remove(self, watched: _Watched) -> None:
        with self._changed:
            self._begun.remove(watched)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._begun = [one for one in self._begun if not one.is_over()]
                while not self._begun:
                    self._changed.wait()
                begun = list(self._begun)
            time.sleep(_POLL)
            for watched in begun:
                with contextlib.suppress(PeerError):  # noted: the run has failed
                    watched.check()


@functools.cache
def _watchdog() -> _Watchdog:
    return _Watchdog()


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
    _watchdog().add(watched)
    try:
        yield
    except BaseException:
        _watchdog().remove(watched)
        raise
    watched.enqueued = device.event_now()
