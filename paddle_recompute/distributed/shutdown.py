"""How this process ends: its failure message, its shutdown message, and the waits before the exit.

A rank that fails sends the reason to the other ranks before it ends: through `Failure.fail` if the
library sees the error, else from `sys.excepthook` and `atexit`. Its process ends after those of the
others, because a launcher ends all ranks of a machine with the first. If a rank hangs in other code
for ``peer_timeout`` after the failure of another one, the thread of the control link ends it.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from paddle_recompute._paddle.native_calls import exit_now
from paddle_recompute.distributed.control_link import ControlLink
from paddle_recompute.distributed.control_server import TICK, ControlServer
from paddle_recompute.distributed.control_wire import Message
from paddle_recompute.distributed.peer_state import PeerState, Scope, one_line
from paddle_recompute.errors import PeerError

_POLL = 0.01
_PARTING = 10.0  # seconds for the server, on a busy machine, to pass on this rank's messages
_RETURN = 5.0  # seconds for collectives to return when the process ends
_LAST = 5.0
"""Seconds that rank 0 waits at its end for the others to end. The thread of Paddle's store, which
is in rank 0 (``LibUVMasterDaemon``, 3.x), aborts if a rank hangs up while the process is torn down.
"""
_TOLD = 1.0  # the same, after a SIGTERM: Paddle's launcher sends a SIGKILL 3 s later
_LAST_AT_START = 30.0
"""Seconds that a rank which fails before all are connected waits for the others to connect."""
Error = TypeVar("Error", bound=BaseException)


@dataclass(eq=False)
class Failure:
    """The failure message of this rank.

    Attributes:
        is_noticed: Whether code of this rank has got an error of the run, so that it ends.
        is_first: Whether this rank failed first.
        seen_by_thread: The error that a daemon thread has got, which does not end the process.
    """

    _state: PeerState
    _link: ControlLink
    is_noticed: bool = False
    is_first: bool = False
    seen_by_thread: str | None = None

    def fail(self, error: Error) -> Error:
        """End the run on all ranks, with `error` as the cause if it is the first; returns it."""
        if threading.current_thread().daemon:  # it does not end the process
            self.seen_by_thread = self.seen_by_thread or str(error)
        else:
            self.is_noticed = True
        if self._state.cause() is None:
            self.is_first = True
            message = str(error) if isinstance(error, PeerError) else one_line(error)
            told: Message = {"kind": "failed", "phase": self._state.phase, "message": message}
            self._state.take({**told, "rank": self._state.rank, "host": socket.gethostname()})
            self._link.send(told)
        return error


class Shutdown:
    """The end of this process: exit handlers, SIGTERM, and a process that hangs.

    Args:
        state: Of this rank.
        link: Takes the shutdown message.
        failure: Of this rank.
        server: In rank 0.
    """

    def __init__(
        self, state: PeerState, link: ControlLink, failure: Failure, server: ControlServer | None
    ) -> None:
        self._state = state
        self._link = link
        self._failure = failure
        self._server = server
        self._process = os.getpid()
        self.end_native_calls: Callable[[float], bool] = lambda patience: True
        """Is called at the end of the process, with seconds; whether all threads are out of C++."""
        self.is_early = False
        """Whether all ranks connect at the start, before Paddle is imported."""
        self.exit_code: int | None = None
        """What the process is about to end with; None: not known, or nothing is wrong."""
        self.has_announced = False
        """Whether the shutdown message was sent."""
        self._passed_on = threading.Event()  # the server has passed on what this rank has sent
        self._over = threading.Event()  # all ranks have ended, or our launcher wants us to
        self._told_to_end = math.inf  # when it did
        self._ticks_stuck = 0
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        self.end_before_paddle()

    def hear(self, kind: str) -> None:
        """Note that the server has passed on this rank's messages, or that all ranks have ended."""
        (self._passed_on if kind == "heard" else self._over).set()

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._failure.fail(error)
        self._announce()
        self._previous_hook(kind, error, trace)
        cause = self._state.cause()
        if cause is not None and cause.startswith(f"rank {self._state.rank} on "):
            sys.stderr.write(f"{cause}\n")  # the logs of several machines may be read as one
        if not issubclass(kind, KeyboardInterrupt):
            self.exit_code = 1  # Python's, for an uncaught error

    def end_before_paddle(self) -> None:
        """Send the shutdown message before the exit handlers of what was imported so far."""
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """Tell the others, whose end lets collectives with them return, and wait for these."""
        if os.getpid() != self._process:
            return
        if self.is_early and not self._state.are_all_connected() and self._state.cause() is None:
            self._failure.fail(SystemExit("its process has ended before all ranks were connected"))
        self._announce()
        ends_last = self._failure.is_first or self._server is not None
        if self._state.cause() is not None and ends_last and not self._state.unreachable:
            self._over.wait(_LAST if self._state.are_all_connected() else _LAST_AT_START)
        is_safe = self.end_native_calls(_RETURN if self._told_to_end == math.inf else _TOLD)
        if self._server is not None:
            is_safe &= self._waits_until_alone(self._server)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Python resets a handler at its end
        is_safe &= self._told_to_end == math.inf  # else a SIGKILL may come before Python has ended
        if self.exit_code is not None and not is_safe:
            # A rank is stopped. Were a collective with it to come back from now on, or that rank
            # to hang up, the process would end with SIGABRT.
            exit_now(self.exit_code)

    def _waits_until_alone(self, server: ControlServer) -> bool:
        deadline = time.monotonic() + _LAST
        while not server.is_alone():
            if time.monotonic() > min(deadline, self._told_to_end + _TOLD):
                return False
            time.sleep(_POLL)
        return True

    def _announce(self) -> None:
        self._end_as_begun_if_told_to()
        if os.getpid() != self._process or self.has_announced:
            return
        self.has_announced = self._failure.is_noticed = True
        self._link.send({"kind": "left", "phase": self._state.phase})
        if self._server is not None:  # let it pass this on before the process ends
            self._passed_on.wait(_PARTING)

    def _end_as_begun_if_told_to(self) -> None:
        """From now on a SIGTERM changes neither the exit code nor the messages of this process.

        Paddle's launcher ends all ranks when one has failed. Paddle's handler of SIGTERM (2.6, 3.x)
        would write a C++ traceback, as of a crash, below the error that says what was wrong.
        """

        def hurry(number: int, frame: object) -> None:
            self._told_to_end = min(self._told_to_end, time.monotonic())
            self._over.set()

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, hurry)

    def explain_sigterm(self) -> None:
        """From now on a SIGTERM raises a `PeerError` in the main thread if the run has failed, and
        ends the process if not.

        Paddle's launcher (2.6, 3.x) sends it to the ranks of a machine of which one has failed.
        Paddle replaces the handler as it is imported, so this is called before and after.
        """

        def explain(number: int, frame: object) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._told_to_end = time.monotonic()
            if not self._link.is_connected():
                self._state.unreachable = self._state.unreachable or (
                    "its control server had not answered when this rank got a SIGTERM"
                )
            state, deadline = self._state, self._told_to_end + 2 * TICK
            while True:
                failure = state.failure(Scope(state.all_ranks, state.limits), 3 * TICK)
                if failure is not None:
                    self._over.set()
                    raise self._failure.fail(
                        PeerError(state.failure_message(failure, "the other ranks"))
                    )
                if time.monotonic() > deadline:
                    break
                time.sleep(5 * _POLL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, explain)

    def end_if_stuck(self) -> None:
        """End the process some time after the run has failed, if its own code has not noticed."""
        cause = self._state.cause()
        if cause is None or self._failure.is_noticed:
            return
        self._ticks_stuck += 1
        if self._ticks_stuck * TICK > self._state.limits.peer_timeout:
            failure_message = (self._failure.seen_by_thread or cause).rstrip(".")
            rank, phase, seconds = self._state.rank, self._state.phase, self._ticks_stuck * TICK
            sys.stderr.write(
                f"PeerError: {failure_message}. Rank {rank} has not noticed {phase} for "
                f"{seconds:.0f} s (peer_timeout), so its process is ended.\n"
            )
            exit_now(1)
