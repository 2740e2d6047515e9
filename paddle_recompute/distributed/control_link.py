"""The connection of a rank to the control server, and the thread that keeps it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from paddle_recompute.distributed import control_wire as wire
from paddle_recompute.distributed.control_server import TICK
from paddle_recompute.distributed.control_wire import Message, RunKey
from paddle_recompute.distributed.peer_state import CONTROL_KEY, PeerState


class ControlLink:
    """Sends messages and heartbeats, and delivers the control server's messages.

    What is sent before the connection exists is kept until it does.

    Args:
        state: Notes that the connection is lost, or cannot be made.
        host: Of rank 0.
        port: Where its control server listens.
        key: Of the run.
        connect_timeout: Seconds to reach it.
    """

    def __init__(
        self, state: PeerState, host: str, port: int, key: RunKey, connect_timeout: float
    ) -> None:
        self._state = state
        self._server_at = (host, port, key, connect_timeout)
        self._sending = threading.Lock()
        self._socket: socket.socket | None = None
        self._unsent: list[bytes] = []
        # A socket that a forked child held open would hide the end of this process.
        os.register_at_fork(after_in_child=self._close)

    def start(self, hear: Callable[[Message], None], tick: Callable[[bool], None]) -> None:
        """Connect, in a thread that lives until the process ends.

        Args:
            hear: Takes each message of the server.
            tick: Is called every `TICK` seconds, with whether there is a connection.
        """
        threading.Thread(target=self._run, args=(hear, tick), name="peers", daemon=True).start()

    def is_connected(self) -> bool:
        """Whether the control server has accepted this rank."""
        return self._socket is not None

    def send(self, message: Message) -> None:
        """Send `message`, now or when the connection exists."""
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

    def _run(self, hear: Callable[[Message], None], tick: Callable[[bool], None]) -> None:
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
                    self._state.server_quiet = 0
                    for message in reader.feed(data):
                        hear(message)
                else:
                    self._state.server_quiet += 1
                if time.monotonic() - last_sign >= TICK:
                    last_sign = time.monotonic()
                    with contextlib.suppress(OSError), self._sending:
                        line.sendall(wire.SIGN_OF_LIFE)
                    tick(True)
        except (OSError, wire.ProtocolError) as error:
            self._state.lost = str(error)
        while True:
            time.sleep(TICK)
            tick(False)

    def _connect(self) -> socket.socket:
        """Connect, and send what was said before; a socket that is closed if that fails."""
        host, port, key, connect_timeout = self._server_at
        deadline, pause = time.monotonic() + connect_timeout, 0.05
        while True:
            try:
                line = wire.connected(
                    host, port, self._state.rank, key, self._state.limits.peer_timeout
                )
                break
            except OSError as error:
                why = f"the control server at {host}:{port} "
                if isinstance(error, wire.KeyRefusedError):
                    why += f"has another key; {CONTROL_KEY} must be the same on all machines"
                elif time.monotonic() > deadline:
                    why += f"did not accept this rank within {connect_timeout:.0f} s ({error})"
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, 1.0)
                    continue
                self._state.unreachable = why
                return socket.socket()
        with self._sending:
            self._socket = line
            with contextlib.suppress(OSError):
                line.sendall(b"".join(self._unsent))
        return line
