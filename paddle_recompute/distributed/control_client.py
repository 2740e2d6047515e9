"""What a rank knows about its peers, and waiting that ends when one of them will never come.

`peers()` connects this process, once, to the control server in rank 0 (`control_server`). A thread
sends signs of life and records what the server says (`peer_state`). Code that waits for other ranks
waits on a `threading.Event`, never in C++, and checks that record regularly: `ControlClient.wait`.
So a rank that waits for a dead, stopped or failed peer ends with a `PeerError` that names the peer,
instead of hanging or of being aborted by a collective.

A rank that fails tells the others why before it ends: through `ControlClient.tell_failure` where
the library sees the error, else from `sys.excepthook` and `atexit`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import selectors
import socket
import sys
import threading
import time
from types import TracebackType
from typing import Any

import paddle.distributed as dist

from paddle_recompute import _paddle
from paddle_recompute.distributed.control_server import TICK, ControlServer, Message, encode
from paddle_recompute.distributed.peer_state import Limits, PeerState, Scope
from paddle_recompute.errors import PeerError, SyncError

_POLL = 0.1
_EXPLANATION = 5.0  # seconds to find out whose fault a failed collective is
_PARTING = 10.0  # seconds for the server, on a busy machine, to pass on this rank's last words
_ADDRESS = "paddle_recompute/control_server"


class _PendingExchange:
    """What the ranks of a channel said, once all of them have."""

    def __init__(self) -> None:
        self.here = threading.Event()
        self.message: Message = {}


class ControlClient:
    """This rank's line to the others. Made by `peers`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.limits = Limits()
        """For waits that belong to no `GradientSync`: those of the newest one."""
        self.place = "before the first step"
        """Where this rank is, for messages."""
        self._process = os.getpid()
        self._sending = threading.Lock()
        self._answers: dict[str, _PendingExchange] = {}
        self._peer_state = PeerState(rank)
        self._heard = threading.Event()  # the control server has repeated our own last words
        self._connected = threading.Event()
        self._socket: socket.socket | None = None
        threading.Thread(target=self._listen, name="peers", daemon=True).start()
        self._await_connection()
        self._last_words: Message = {"kind": "left", "message": None}
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self._say_goodbye)
        os.register_at_fork(after_in_child=self._close)

    # ------------------------------------------------------------------------------ waiting

    def exchange(self, content: Any, label: str, scope: Scope, *, lane: str = "main") -> list[Any]:
        """Give `content` (for JSON) to all ranks of `scope`, and return theirs, in rank order.

        Returns when all have called it, so it is a barrier too. About 0.2 ms.

        Args:
            content: What JSON can hold.
            label: What this is about; must be the same on all ranks.
            scope: The ranks.
            lane: Each thread that exchanges has its own; that of the main thread is the same for
                all scopes of the same ranks, so that a rank that is elsewhere is noticed.

        Raises:
            SyncError: The ranks are in different places of the program: their labels differ.
            PeerError: A rank will not come.
        """
        channel = f"{scope.ranks}/{lane}"
        answer = self._answers[channel] = _PendingExchange()
        self._send(
            {
                "kind": "exchange",
                "channel": channel,
                "scope": scope.key,
                "ranks": scope.ranks,
                "label": label,
                "content": content,
            }
        )
        self.wait(answer.here, label, scope)
        labels = answer.message.get("labels")
        if labels is not None:
            where = ", ".join(f"rank {rank} is at {at}" for rank, at in labels.items())
            raise SyncError(
                f"the ranks are not in the same place of the program: {where}. Every rank must "
                "take the same number of steps and make the same calls in the same order."
            )
        contents: list[Any] = answer.message["contents"]
        return contents

    def wait(self, event: threading.Event, what: str, scope: Scope) -> None:
        """Return when `event` is set.

        Args:
            event: Set by another thread of this process.
            what: What one waits for, for messages.
            scope: The ranks whose death or failure ends the wait.

        Raises:
            PeerError: One of them has died, failed, fallen silent, or not come in time.
        """
        waited = 0.0
        began = time.monotonic()
        while not event.wait(min(_POLL, max(waited, 0.002))):
            waited = time.monotonic() - began
            try:
                self.check(scope, what, waited=waited)
            except PeerError:
                if not event.is_set():
                    raise

    def check(self, scope: Scope, what: str, *, waited: float = 0.0) -> None:
        """Raise if waiting for `what` from the ranks of `scope`, `waited` seconds so far, is in
        vain as far as is known.
        """
        trouble = self._peer_state.trouble(scope, waited)
        if trouble is not None:
            raise PeerError(self._complaint(trouble, what))

    def explain(self, error: BaseException, what: str, scope: Scope) -> PeerError:
        """The `PeerError` that says why a collective of `scope` failed with `error`.

        The collective may fail a moment before the reason is known, so this waits for it.
        """
        patience = min(_EXPLANATION, scope.limits.peer_timeout)
        deadline = time.monotonic() + patience + 2 * TICK
        while time.monotonic() < deadline:
            trouble = self._peer_state.trouble(scope, waited=0.0, patience=patience)
            if trouble is not None:
                return PeerError(self._complaint(trouble, what))
            time.sleep(_POLL)
        return PeerError(
            f"{what} failed on rank {self.rank} {self.place}, although all ranks show signs of "
            f"life: {error}"
        )

    def _complaint(self, trouble: str, what: str) -> str:
        return f"{trouble}. Rank {self.rank} waited {self.place} for {what}."

    # ------------------------------------------------------------------------------ speaking

    def tell_failure(self, error: BaseException, scope: Scope) -> None:
        """Let the other ranks of `scope` end too, with the message of `error`."""
        message = str(error) if isinstance(error, PeerError) else _one_line(error)
        told = {"kind": "failed", "scope": scope.key, "place": self.place, "message": message}
        self._send(told | {"is_peer_error": isinstance(error, PeerError)})

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        message = str(error) if isinstance(error, PeerError) else _one_line(error)
        self._last_words["message"] = message
        self._last_words["is_peer_error"] = isinstance(error, PeerError)
        self._say_goodbye()
        self._previous_hook(kind, error, trace)

    def _say_goodbye(self) -> None:
        if os.getpid() != self._process or self._last_words.get("said"):
            return
        self._last_words["said"] = True
        self._send(self._last_words | {"place": self.place})
        if self.rank == 0:  # the server lives here: let it pass this on before the process ends
            self._heard.wait(_PARTING)

    def _send(self, message: Message) -> None:
        # The listener notes a closed connection when it has read all that the server said before:
        # it may have said why.
        with contextlib.suppress(OSError), self._sending:
            assert self._socket is not None
            self._socket.sendall(encode(message))

    # ----------------------------------------------------------------------------- listening

    def _await_connection(self) -> None:
        began = time.monotonic()
        while not self._connected.wait(_POLL):
            if self._peer_state.lost is not None:
                raise PeerError(
                    f"rank 0 cannot be reached, it may have died: {self._peer_state.lost}"
                )
            if time.monotonic() - began > self.limits.stall_timeout:
                raise PeerError(
                    f"rank 0 did not come within {self.limits.stall_timeout:.0f} s to where rank "
                    f"{self.rank} waits for it; every rank of a run must call GradientSync, "
                    "barrier or the like, rank 0 too"
                )

    def _listen(self) -> None:
        """Send signs of life and note what the control server says, until the process ends."""
        try:
            self._socket = line = self._connect()
            self._send({"kind": "alive"})
            self._connected.set()
            news = selectors.DefaultSelector()
            news.register(line, selectors.EVENT_READ)
            received, last_sign = b"", time.monotonic()
            while True:
                if news.select(TICK):
                    data = line.recv(1 << 16)
                    if not data:
                        raise ConnectionError("no more data")
                    self._peer_state.server_quiet = 0
                    *lines, received = (received + data).split(b"\n")
                    for text in lines:
                        self._hear(json.loads(text))
                else:
                    self._peer_state.server_quiet += 1
                if time.monotonic() - last_sign >= TICK:
                    last_sign = time.monotonic()
                    self._send({"kind": "alive"})
        except (OSError, RuntimeError) as error:  # RuntimeError: the store's
            self._peer_state.lost = self._peer_state.lost or str(error)

    def _connect(self) -> socket.socket:
        host = _paddle.master_host()
        if self.rank == 0:
            server = ControlServer(host)
            port, token = server.port, server.token
            _paddle.store_publish(_ADDRESS, json.dumps([port, token]))
        else:
            port, token = json.loads(_paddle.store_await(_ADDRESS))
        line = socket.create_connection((host, port), timeout=self.limits.peer_timeout)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(encode({"kind": "hello", "rank": self.rank, "token": token}))
        return line

    def _hear(self, message: Message) -> None:
        if message["kind"] == "exchanged":
            answer = self._answers[message["channel"]]
            answer.message = message
            answer.here.set()
        elif message["kind"] == "left" and message["rank"] == self.rank:
            self._heard.set()
        else:
            self._peer_state.take(message)

    def _close(self) -> None:
        """In a forked child: a socket that it held open would hide the end of this process."""
        if self._socket is not None:
            self._socket.close()


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@functools.cache
def peers() -> ControlClient:
    """This process's line to the other ranks; connects at the first call, for which rank 0 must
    call it too.
    """
    return ControlClient(dist.get_rank())
