"""SIGTERM or SIGINT to any rank ends the run on all of them, after the same step.

Nothing is asked of the network before that: a rank that was asked to stop says so to the control
server, which tells the others. A thread of each rank then meets those of the others and says which
step its rank is at. The ranks stop after the newest of these: none of them can be beyond it, since
the main thread waits at the end of its step once the thread has noted it.
"""

from __future__ import annotations

import itertools
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from paddle_recompute.distributed.control_client import peers
from paddle_recompute.distributed.ranks import is_distributed, scope_of, values_of_ranks
from paddle_recompute.errors import PeerError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL = 0.25
_numbers = itertools.count()


class StopRequest:
    """Inside ``with``, the signals do not end the process: `after` says when the run is to end.

    A second SIGINT raises KeyboardInterrupt.

    Args:
        first_step: The step that is made next; the same on all ranks, which all make one of these.

    Attributes:
        signal_number: Which signal it was; None while there was none.
    """

    def __init__(self, first_step: int) -> None:
        self.signal_number: int | None = None
        self._step = first_step
        self._last: int | None = None
        self._asked: int | None = None
        self._is_held = False
        self._lock = threading.Lock()
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._number = next(_numbers)
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        if is_distributed():
            self._thread = threading.Thread(target=self._watch, name="stop request", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._thread is not None:
            self._thread.join(timeout=5)

    def after(self, step: int) -> bool:
        """Whether the run ends after `step`, which this rank has just made.

        Raises:
            PeerError: The ranks were asked to stop, and one of them has died.
        """
        if self._thread is None:
            self.signal_number = self._asked
            return self._asked is not None
        with self._lock:
            if not self._is_held:
                self._step = step + 1
                return False
        peers().wait(self._decided, "the agreement to stop", scope_of(None))
        return self._last is not None and step >= self._last

    def at_end(self) -> bool:
        """Whether a rank was asked to stop in the last step. All ranks call it, in place of `after`
        that step.

        Raises:
            PeerError: A rank has died.
        """
        asked = [number for number in values_of_ranks(self._asked, "the end of training") if number]
        self.signal_number = asked[0] if asked else None
        return bool(asked)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked == signal.SIGINT == number:
            raise KeyboardInterrupt
        self._asked = self._asked or int(number)

    def _watch(self) -> None:
        """In a thread: pass a signal on, take note of that of another rank, agree on a step."""
        # A handler of a signal may not send: it may have interrupted what sends.
        while self._asked is None and not peers().is_asked_to_stop(self._number):
            if self._closed.wait(_POLL):
                return
        if self._asked is not None:
            peers().ask_to_stop(self._number)
        with self._lock:
            self._is_held = True
            step = self._step
        label = f"stop request {self._number}"
        try:
            said = values_of_ranks([step, self._asked or 0], label, lane=label)
        except PeerError:  # the main thread waits too, and raises it
            return
        self._last = max(last for last, _ in said)
        # Of different signals SIGTERM counts.
        self.signal_number = max(number for _, number in said)
        self._decided.set()
