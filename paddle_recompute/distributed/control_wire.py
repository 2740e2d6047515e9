"""What travels on the control connection: the handshake, signs of life, messages.

A message is a line of JSON, and a sign of life is an empty line. The first message of a rank is
`hello`, with the key of the run. The server answers with one byte: `ACCEPTED`, or `REFUSED` to a
rank with another key. It closes the connection after `REFUSED`, and after whatever is no message.
"""

from __future__ import annotations

import hmac
import json
import socket
from typing import Any

Message = dict[str, Any]

SIGN_OF_LIFE = b"\n"
LONGEST_MESSAGE = 2**24
"""Bytes. The longest are lists of parameters, where the ranks' lists differ."""
ACCEPTED, REFUSED = b"+", b"-"


class ProtocolError(Exception):
    """The other side does not keep to the protocol; its connection is to be closed."""


class KeyRefusedError(ConnectionError):
    """The server has another key."""


def hello(rank: int, key: bytes, host: str = "") -> bytes:
    """The first message of `rank`."""
    return encode({"kind": "hello", "rank": rank, "host": host, "key": key.hex()})


def has_key(message: Message, key: bytes) -> bool:
    """Whether the sender of a `hello` has `key`. Compares in constant time."""
    return hmac.compare_digest(message["key"].encode(), key.hex().encode())


def connected(host: str, port: int, rank: int, key: bytes, timeout: float) -> socket.socket:
    """A connection to the control server that has accepted this rank.

    Raises:
        KeyRefusedError: The server has another key.
        OSError: There is no server, or it does not accept this rank.
    """
    line = socket.create_connection((host, port), timeout=timeout)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(hello(rank, key, socket.gethostname()))
        answer = line.recv(1)
        if answer == REFUSED:
            raise KeyRefusedError("it has another key")
        if answer != ACCEPTED:
            raise ConnectionError("it closed the connection")
    except OSError:
        line.close()
        raise
    return line


def encode(message: Message) -> bytes:
    """`message` on the wire."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in `line`.

    Raises:
        ProtocolError: There is none.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise ProtocolError("not a message")
    return message


class Reader:
    """Cuts what has arrived into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with `data`; signs of life are left out.

        Raises:
            ProtocolError: It is none of ours.
        """
        self._received += data
        if b"\n" not in data:
            return []
        *lines, self._received = self._received.split(b"\n")
        return [decode(bytes(line)) for line in lines if line]
