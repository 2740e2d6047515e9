"""SIGTERM or SIGINT to any rank ends the run on all of them, after the same step.

A rank that was asked to stop says so with the numbers that all ranks sum next; each step has some
(`sum_over_ranks`, and the agreement of `GradientSync`). So all ranks learn it in the same step, and
nothing is asked of the network for it.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from paddle_recompute.distributed.connection import is_distributed
from paddle_recompute.distributed.numbers import reduce_numbers

_NUMBERS = {signal.SIGTERM: 2.0**26, signal.SIGINT: 1.0}
"""What a rank that has got a signal adds to the sum. Of different signals SIGTERM counts."""


class StopRequest:
    """Inside ``with``, the signals do not end the process: `is_due` says when the run is to end.

    A second SIGINT raises KeyboardInterrupt.

    Attributes:
        signal_number: The signal after whose arrival all ranks stop; None while there is none.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.asked: int | None = None
        """The signal that this rank has got."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _NUMBERS}
        _current.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _current.remove(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def is_due(self) -> bool:
        """Whether the run ends after the step that was just made, on all ranks."""
        if not is_distributed():
            self.signal_number = self.asked
        return self.signal_number is not None

    def is_due_at_end(self) -> bool:
        """As `is_due`, of a signal that came at the very end of the last step too. All ranks call
        it.

        Raises:
            PeerError: A rank has died.
        """
        if is_distributed():
            hear_asked(*reduce_numbers([asked()], "sum", "the end of training"))
        return self.is_due()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.asked = self.asked or int(number)


_current: list[StopRequest] = []


def asked() -> float:
    """What this rank adds to the next sum of numbers over all ranks."""
    return max(
        (_NUMBERS[signal.Signals(request.asked)] for request in _current if request.asked),
        default=0.0,
    )


def hear_asked(total: float) -> None:
    """Note the sum over all ranks of `asked`."""
    for request in _current if total else ():
        number = signal.SIGTERM if total >= _NUMBERS[signal.SIGTERM] else signal.SIGINT
        request.signal_number = int(number)
