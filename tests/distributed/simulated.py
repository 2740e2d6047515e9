"""Ranks that are nothing but a connection to a control server; they need no Paddle."""

from __future__ import annotations

import socket
import time
from typing import Any

from paddle_recompute.distributed import control_wire as wire
from paddle_recompute.distributed.control_server import ControlServer

KEY = wire.RunKey("this run", b"k" * 32)
OTHER_SECRET = wire.RunKey("this run", b"guessed")


class SimulatedRank:
    """One rank's side of the line, message by message."""

    def __init__(self, server: ControlServer, rank: int, key: wire.RunKey = KEY) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        self._reader = wire.Reader()
        self._heard: list[wire.Message] = []
        try:
            wire.introduce(self.socket, rank, key)
            self.is_in = True
        except OSError:
            self.is_in = False

    def say(self, **message: Any) -> None:
        self.socket.sendall(wire.encode(message))

    def arrive(self, digest: str, *, size: int, label: str = "x") -> None:
        self.say(kind="arrive", channel="c", size=size, label=label, value=digest, most=0)

    def hear(self, within: float = 10.0) -> wire.Message:
        """The next message; an empty one when the server has closed the line, or says nothing.

        Silence is left out: these ranks show signs of life when they are told to.
        """
        deadline = time.monotonic() + within
        while True:
            while self._heard:
                message = self._heard.pop(0)
                if message["kind"] != "silent":
                    return message
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                data = self.socket.recv(1 << 16)
            except (TimeoutError, ConnectionError):
                return {}
            if not data:
                return {}
            self._heard += self._reader.feed(data)

    def end(self) -> None:
        self.socket.close()
