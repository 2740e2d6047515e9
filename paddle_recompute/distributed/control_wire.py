"""What travels on the control connection: the handshake, signs of life, messages.

Whoever connects gets a challenge, and answers it with `HELLO_BYTES`: its rank, its host, and an
HMAC-SHA256 of both and the challenge under the key of the run. They are compared before anything
is parsed, and the key does not travel. The server answers with one byte: `ACCEPTED`, or `REFUSED`
to a rank with another key, and closes the connection.

Afterwards a message is a line of JSON, and a sign of life is an empty line.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

SIGN_OF_LIFE = b"\n"
LONGEST_MESSAGE = 2**24
"""Bytes. The longest are lists of parameters, where the ranks' lists differ."""
CHALLENGE_BYTES = 32
ACCEPTED, REFUSED = b"+", b"-"
_HELLO = struct.Struct(">Q64s32s")
HELLO_BYTES = _HELLO.size
_FIELDS: dict[str, dict[str, type]] = {
    "arrive": {"channel": str, "size": int, "label": str, "most": int},
    "waits": {"among": str, "size": int, "serial": int, "place": str, "label": str},
    "wait ended": {},
    "failed": {"place": str, "message": str},
    "left": {"place": str},
}
"""What a rank may say, and what must be in it."""


class ProtocolError(Exception):
    """The other side does not keep to the protocol; its connection is to be closed."""


class KeyRefusedError(ConnectionError):
    """The server has another key."""


@dataclass(frozen=True)
class Hello:
    """What a connection says of itself.

    Attributes:
        rank: Its number; any, until `has_key`.
        host: The name of its machine.
        has_key: Whether it has proved that it knows the key.
    """

    rank: int
    host: str
    has_key: bool


def new_challenge() -> bytes:
    """What a server sends to whoever connects."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def hello(rank: int, challenge: bytes, key: bytes, host: str = "") -> bytes:
    """A rank's answer to `challenge`."""
    name = host.encode()[:64].ljust(64, b"\0")
    return _HELLO.pack(rank, name, _proof(key, challenge, name, rank))


def read_hello(said: bytes, challenge: bytes, key: bytes) -> Hello:
    """What `said` tells, of `HELLO_BYTES`. Compares in constant time."""
    rank, name, proof = _HELLO.unpack(said)
    has_key = hmac.compare_digest(proof, _proof(key, challenge, name, rank))
    return Hello(rank, name.rstrip(b"\0").decode(errors="replace"), has_key)


def connected(host: str, port: int, rank: int, key: bytes, timeout: float) -> socket.socket:
    """A connection to the control server that has accepted this rank.

    Raises:
        KeyRefusedError: The server has another key.
        OSError: There is no server, or it does not accept this rank.
    """
    line = socket.create_connection((host, port), timeout=timeout)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = _received(line, CHALLENGE_BYTES)
        line.sendall(hello(rank, challenge, key, socket.gethostname()))
        if _received(line, 1) != ACCEPTED:
            raise KeyRefusedError("it has another key")
    except OSError:
        line.close()
        raise
    return line


def _received(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        new = line.recv(size - len(data))
        if not new:
            raise ConnectionError("it closed the connection")
        data += new
    return data


def _proof(key: bytes, challenge: bytes, name: bytes, rank: int) -> bytes:
    return hmac.digest(key, b"/".join([challenge, name, str(rank).encode()]), "sha256")


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


def checked(message: Message) -> Message:
    """`message` of a rank.

    Raises:
        ProtocolError: A rank says no such thing.
    """
    kind = message.get("kind")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or any(type(message.get(name)) is not of for name, of in fields.items()):
        raise ProtocolError(f"no such message: {kind}")
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
