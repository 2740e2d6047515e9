"""What a rank knows about its peers, and waiting that ends when one of them will never come.

A `ControlClient` connects this process to the control server in rank 0 (`control_server`). A thread
sends signs of life and records what the server says (`peer_state`). Code that waits for other ranks
waits on a `threading.Event`, never in C++, and checks that record: `ControlClient.wait_until`.
So a rank that waits for a dead, stopped or failed peer ends with a `PeerError` that names the peer,
instead of hanging or of being aborted by a collective.

A rank that goes on says nothing but that it lives. One that has waited for longer than a tick says
where, so that the others learn whom they wait for, and that ranks which wait at different places
are told.

The first failure ends the run, on all ranks: from then on every wait of every rank raises an error
with that cause, and nothing begins again. A rank that fails tells the others why before it ends:
through `ControlClient.fail` where the library sees the error, else from `sys.excepthook` and
`atexit`; its process ends after those of the others, for a launcher ends all ranks of a machine
with the first. A rank that does not come to any wait within ``peer_timeout`` after that, because it
hangs in code of somebody else, is ended by the thread.

Needs no Paddle: `early.connect_early` connects before Paddle is imported, `connection.peers` after
the ranks have joined Paddle's process group.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from paddle_recompute._paddle.native_calls import exit_now
from paddle_recompute.distributed import control_wire as wire
from paddle_recompute.distributed.control_server import TICK, ControlServer
from paddle_recompute.distributed.control_wire import Message
from paddle_recompute.distributed.peer_state import (
    CONTROL_KEY,
    Limits,
    PeerState,
    Said,
    Scope,
    one_line,
    ranks_apart,
    where,
)
from paddle_recompute.errors import PeerError, SyncError

_POLL = 0.1
_MOST_CONTENTS = 8  # the message of an error has room for few
_EXPLANATION = 5.0  # seconds to find out whose fault a failed collective is
_PARTING = 10.0  # seconds for the server, on a busy machine, to pass on this rank's last words
_RETURN = 5.0  # seconds for collectives to return when the process ends
_LAST = 5.0
"""Seconds that rank 0 waits at its end for the others to end. The thread of Paddle's store, which
is in rank 0 (``LibUVMasterDaemon``, 3.x), aborts if a rank hangs up while the process is torn down.
"""
_TOLD = 1.0  # the same, after a SIGTERM: Paddle's launcher sends a SIGKILL 3 s later
_LAST_AT_START = 30.0
"""Seconds that a rank which fails before all are connected waits for the others to connect."""
Error = TypeVar("Error", bound=BaseException)


class _Answer:
    """That of the server, when all ranks have arrived."""

    def __init__(self) -> None:
        self.here = threading.Event()
        self.groups: list[Message] = []


class ControlClient:
    """This rank's connection to the others.

    Args:
        rank: Of this process.
        size: How many ranks there are.
        host: Of rank 0.
        port: Where its control server listens.
        key: Of the run.
        patience: Seconds to reach it.
        server: In rank 0.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        port: int,
        key: bytes,
        patience: float,
        server: ControlServer | None = None,
    ) -> None:
        self.rank = rank
        self.limits = Limits()
        """For waits that belong to no `GradientSync`: those of the newest one."""
        self.place = "before the first step"
        """Where this rank is, for messages."""
        self.all_ranks = tuple(range(size))
        self.watched: set[Any] = set()
        """Collectives of a device that have begun; `check_collectives` looks at them."""
        self.hand_on: Callable[[BaseException], None] = lambda error: None
        """Is given each error with which a wait ends."""
        self.check_collectives: Callable[[], None] = lambda: None
        """Is called by the thread in each tick."""
        self.end_native_calls: Callable[[float], bool] = lambda patience: True
        """Is called at the end of the process, with seconds; whether all threads are out of C++."""
        self._server_at = (host, port, key, patience)
        self._process = os.getpid()
        self._sending = threading.Lock()
        self._socket: socket.socket | None = None
        self._unsent: list[bytes] = []
        self._answers: dict[str, _Answer] = {}
        self._waits = itertools.count(1)
        self._peer_state = PeerState(rank)
        self._heard = threading.Event()  # the control server has passed on our last words
        self._over = threading.Event()  # all ranks have ended, or our launcher wants us to
        self._told_to_end = math.inf  # when it did
        self._has_said_goodbye = False
        self._is_failed = False
        """Whether code of this rank was told that the run has failed, so that it ends by itself."""
        self._ends_last = server is not None
        """Whether it failed first, or has the server: the others are to end before this process."""
        self._complaint_of_thread: str | None = None
        self.is_early = False
        """Whether `connect_early` has made it, so that all ranks connect at the start."""
        self.exit_code: int | None = None
        """What the process is about to end with; None: not known, or nothing is wrong."""
        self._ticks_stuck = 0
        self._server = server
        threading.Thread(target=self._listen, name="peers", daemon=True).start()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        self.end_before_paddle()
        # A socket that a forked child held open would hide the end of this process.
        os.register_at_fork(after_in_child=self._close)

    def exchange(
        self, label: str, scope: Scope, value: Any = None, *, lane: str = "main", most: int = 0
    ) -> list[Said]:
        """Wait for all ranks of `scope`, and learn what each says.

        One message to rank 0 and one back. Not for the steps of a training: rank 0 serves all
        ranks.

        Args:
            label: What this is about; must be the same on all ranks.
            scope: The ranks.
            value: What JSON can hold.
            lane: Each thread that meets others has its own; that of the main thread is the same for
                all scopes of the same ranks, so that a rank that is elsewhere is noticed.
            most: How many different values are wanted; the same on all ranks. 0: all of them.

        Returns:
            The different values in the order of the first rank of each; one if all are the same.

        Raises:
            SyncError: The ranks are in different places of the program: their labels differ.
            PeerError: A rank will not come.
        """
        self.check(scope, label)
        channel = f"{scope.among}/{lane}"
        answer = self._answers[channel] = _Answer()
        told = {"channel": channel, "size": len(scope.ranks), "label": label, "most": most}
        self._send({"kind": "arrive", **told, "value": value})
        self.wait_until(answer.here.wait, label, scope)
        groups = answer.groups
        if len({group["label"] for group in groups}) > 1:
            raise self.fail(ranks_apart(where(groups)))
        return [Said(tuple(one["ranks"] or scope.ranks), one["value"]) for one in groups]

    def compare(self, label: str, scope: Scope, content: Any) -> list[Said] | None:
        """Who says what, of at most 8 different contents; None where all ranks say the same.

        A digest travels first, so it costs a short message where all say the same, and the content
        from one rank for each digest where not. Arguments and errors as of `exchange`.
        """
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        groups = self.exchange(label, scope, digest, most=_MOST_CONTENTS)
        if len(groups) == 1:
            return None
        asked = [group.ranks[0] for group in groups]
        said = self.exchange(label, scope, content if self.rank in asked else None)
        content_of = {rank: one.content for one in said for rank in one.ranks}
        return [Said(group.ranks, content_of[group.ranks[0]]) for group in groups]

    def wait_until(
        self,
        has_come: Callable[[float], bool],
        what: str,
        scope: Scope,
        *,
        announces: bool = True,
    ) -> None:
        """Return when something has come.

        Args:
            has_come: ``has_come(seconds)`` waits for it for so long at most, and says whether it
                has come.
            what: What this rank waits for, for messages. Up to a colon, it is the part of the
                program; ranks whose main threads wait in different ones wait for ever, which they
                are told.
            scope: The ranks whose death or failure ends the wait.
            announces: Whether it needs the main threads of the others, which must not wait in
                different places then.

        Raises:
            PeerError: One of them has died, failed, fallen silent, or not come in time.
            SyncError: The ranks wait for each other in different places.
        """
        waited = 0.0
        began = time.monotonic()
        announces &= threading.current_thread() is threading.main_thread()
        serial = 0
        try:
            while not has_come(_POLL):
                waited = time.monotonic() - began
                if announces and not serial and waited > TICK:
                    serial = next(self._waits)
                    told = {"label": what, "place": what.partition(":")[0], "serial": serial}
                    told |= {"among": scope.among, "size": len(scope.ranks)}
                    self._send({"kind": "waits", **told})
                error = self.trouble(scope, what, waited, serial)
                if error is not None and not has_come(0.0):
                    self.hand_on(self.fail(error))
                    raise error
        finally:
            if serial:
                self._send({"kind": "wait ended"})

    def check(self, scope: Scope, what: str, *, waited: float = 0.0) -> None:
        """Raise if waiting for `what` from the ranks of `scope`, `waited` seconds so far, is in
        vain as far as is known. That ends the run: it is raised at all later checks too.

        Raises:
            PeerError: A rank has died, failed, fallen silent, or not come in time.
        """
        error = self.trouble(scope, what, waited)
        if error is not None:
            raise self.fail(error)

    def trouble(
        self, scope: Scope, what: str, waited: float, serial: int | None = None
    ) -> SyncError | None:
        """Why waiting is in vain, as an error; None if it is not. Arguments as of `check`."""
        trouble = self._peer_state.trouble(scope, waited)
        if trouble is not None:
            return PeerError(self._complaint(trouble, what))
        apart = self._peer_state.apart(serial) if serial else None
        return ranks_apart(apart) if apart is not None else None

    def explain(self, error: BaseException, what: str, scope: Scope) -> PeerError:
        """The `PeerError` that says why a collective of `scope` failed with `error`.

        The collective may fail a moment before the reason is known, so this waits for it.
        """
        patience = min(_EXPLANATION, scope.limits.peer_timeout)
        deadline = time.monotonic() + patience + 2 * TICK
        while time.monotonic() < deadline:
            trouble = self._peer_state.trouble(scope, waited=0.0, patience=patience)
            if trouble is not None:
                return self.fail(PeerError(self._complaint(trouble, what)))
            time.sleep(_POLL)
        return self.fail(
            PeerError(
                f"{what} failed on rank {self.rank} {self.place}, although all ranks show signs of "
                f"life: {error}"
            )
        )

    def _complaint(self, trouble: str, what: str) -> str:
        if re.match(rf"rank {self.rank}\b", trouble):
            return (
                f"{trouble}. That ended the run on all ranks, so rank {self.rank} cannot begin "
                f"{what}; start the ranks again, from the last checkpoint. To skip a batch whose "
                "forward fails, run the forward before last_backward() and let all ranks skip the "
                "step: docs/gradient_synchronization.md has an example"
            )
        return f"{trouble}. Rank {self.rank} waited {self.place} for {what}."

    def fail(self, error: Error) -> Error:
        """End the run on all ranks, with `error` as the cause if it is the first; returns it."""
        if threading.current_thread().daemon:  # it does not end the process
            self._complaint_of_thread = self._complaint_of_thread or str(error)
        else:
            self._is_failed = True
        if self._peer_state.cause() is None:
            self._ends_last = True
            message = str(error) if isinstance(error, PeerError) else one_line(error)
            told: Message = {"kind": "failed", "place": self.place, "message": message}
            self._peer_state.take({**told, "rank": self.rank, "host": socket.gethostname()})
            self._send(told)
        return error

    def cause(self) -> str | None:
        """What has ended the run on all ranks, with the rank and its host; None: nothing has."""
        return self._peer_state.cause()

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.fail(error)
        self._say_goodbye()
        self._previous_hook(kind, error, trace)
        if (cause := self.cause()) is not None and cause.startswith(f"rank {self.rank} on "):
            sys.stderr.write(f"{cause}\n")  # the logs of several machines may be read as one
        if not issubclass(kind, KeyboardInterrupt):
            self.exit_code = 1  # Python's, for an uncaught error

    def end_before_paddle(self) -> None:
        """Say goodbye before the exit handlers of what was imported so far."""
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        """Tell the others, whose end lets collectives with them return, and wait for these."""
        if os.getpid() != self._process:
            return
        if self.is_early and not self._peer_state.are_all_connected() and self.cause() is None:
            self.fail(SystemExit("its process has ended before all ranks were connected"))
        self._say_goodbye()
        if self.cause() is not None and self._ends_last and not self._peer_state.unreachable:
            self._over.wait(_LAST if self._peer_state.are_all_connected() else _LAST_AT_START)
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
            time.sleep(_POLL / 10)
        return True

    def _say_goodbye(self) -> None:
        self._end_as_begun_if_told_to()
        if os.getpid() != self._process or self._has_said_goodbye:
            return
        self._has_said_goodbye = self._is_failed = True
        self._send({"kind": "left", "place": self.place})
        if self.rank == 0:  # the server lives here: let it pass this on before the process ends
            self._heard.wait(_PARTING)

    def _end_as_begun_if_told_to(self) -> None:
        """From now on a SIGTERM changes neither the exit code nor the last words of this process.

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
            if self._socket is None:
                self._peer_state.unreachable = self._peer_state.unreachable or (
                    "its control server had not answered when this rank got a SIGTERM"
                )
            scope, deadline = Scope(self.all_ranks, self.limits), self._told_to_end + 2 * TICK
            while True:
                trouble = self._peer_state.trouble(scope, 3 * TICK)
                if trouble is not None:
                    self._over.set()
                    raise self.fail(PeerError(self._complaint(trouble, "the other ranks")))
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL / 2)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, explain)

    def _send(self, message: Message) -> None:
        # The listener notes a closed connection when it has read all that the server said before:
        # it may have said why.
        with contextlib.suppress(OSError), self._sending:
            if self._socket is None:
                self._unsent.append(wire.encode(message))
            else:
                self._socket.sendall(wire.encode(message))

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _listen(self) -> None:
        """Send signs of life and note what the control server says, until the process ends."""
        line = self._connect()
        news = selectors.DefaultSelector()
        reader, last_sign = wire.Reader(), time.monotonic()
        try:
            news.register(line, selectors.EVENT_READ)
            while True:
                if news.select(TICK):
                    data = line.recv(1 << 16)
                    if not data:
                        raise ConnectionError("no more data")
                    self._peer_state.server_quiet = 0
                    for message in reader.feed(data):
                        self._hear(message)
                else:
                    self._peer_state.server_quiet += 1
                if time.monotonic() - last_sign >= TICK:
                    last_sign = time.monotonic()
                    with contextlib.suppress(OSError), self._sending:
                        line.sendall(wire.SIGN_OF_LIFE)
                    self.check_collectives()
                    self._end_if_stuck()
        except (OSError, wire.ProtocolError) as error:
            self._peer_state.lost = str(error)
        while True:
            time.sleep(TICK)
            self._end_if_stuck()

    def _end_if_stuck(self) -> None:
        """End the process some time after the run has failed, if its own code has not noticed."""
        cause = self._peer_state.cause()
        if cause is None or self._is_failed:
            return
        self._ticks_stuck += 1
        if self._ticks_stuck * TICK > self.limits.peer_timeout:
            complaint = (self._complaint_of_thread or cause).rstrip(".")
            sys.stderr.write(
                f"PeerError: {complaint}. Rank {self.rank} has not noticed {self.place} for "
                f"{self._ticks_stuck * TICK:.0f} s (peer_timeout), so its process is ended.\n"
            )
            exit_now(1)

    def _connect(self) -> socket.socket:
        """Connect, and send what was said before; a socket that is closed if that fails."""
        host, port, key, patience = self._server_at
        deadline, pause = time.monotonic() + patience, 0.05
        while True:
            try:
                line = wire.connected(host, port, self.rank, key, self.limits.peer_timeout)
                break
            except OSError as error:
                why = f"the control server at {host}:{port} "
                if isinstance(error, wire.KeyRefusedError):
                    why += f"has another key; {CONTROL_KEY} must be the same on all machines"
                elif time.monotonic() > deadline:
                    why += f"did not accept this rank within {patience:.0f} s ({error})"
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, 1.0)
                    continue
                self._peer_state.unreachable = why
                return socket.socket()
        with self._sending:
            self._socket = line
            with contextlib.suppress(OSError):
                line.sendall(b"".join(self._unsent))
        return line

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "met":
            answer = self._answers[message["channel"]]
            answer.groups = message["groups"]
            answer.here.set()
        elif kind == "heard":
            self._heard.set()
        elif kind == "over":
            self._over.set()
        else:
            self._peer_state.take(message)
