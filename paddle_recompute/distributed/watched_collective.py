"""Collectives that end with a `PeerError` where a peer is gone, and begin when all are there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from paddle_recompute.distributed.control_client import peers
from paddle_recompute.distributed.peer_state import Scope
from paddle_recompute.errors import SyncError

Result = TypeVar("Result")


class _Run(threading.Thread, Generic[Result]):
    def __init__(self, function: Callable[[], Result]) -> None:
        super().__init__(name="collective", daemon=True)
        self._function = function
        self.ended = threading.Event()
        self.result: Result
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._function()
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()


def run_watched(function: Callable[[], Result], what: str, scope: Scope) -> Result:
    """The result of ``function()``, which calls gloo collectives between the ranks of `scope`.

    It is called when all ranks are here, as gloo waits 30 s at most; and in a thread of its own, as
    gloo cannot be interrupted while it waits for a process that is stopped. No other thread uses
    the group meanwhile, because the caller waits. Costs an exchange and a thread, about 0.4 ms.

    Args:
        function: The collectives; the same on every rank.
        what: Names them, for messages; the same on every rank.
        scope: The ranks that take part.

    Raises:
        PeerError: A rank will not come, or a collective failed.
    """
    peers().exchange(None, what, scope)
    run = _Run(function)
    run.start()
    peers().wait(run.ended, what, scope)
    run.join()  # it has nothing left to do, and must not do it while the process ends
    if run.error is None:
        return run.result
    if isinstance(run.error, SyncError):
        raise run.error
    raise peers().explain(run.error, what, scope) from run.error
