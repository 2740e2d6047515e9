"""What travels on the control connection: the handshake, signs of life, messages.

Whoever connects gets a challenge, and has to answer it with 64 bytes: its rank, a challenge of its
own, and an HMAC-SHA256 of all of them under the key of the run. They are compared before anything
is parsed, and the key does not travel. The server answers the rank's challenge in the same way, so
that no rank talks to a stranger who has taken the port.

Afterwards a message is a line of JSON, and a sign of life is an empty line.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from typing import Any

Message = dict[str, Any]

SIGN_OF_LIFE = b"\n"
LONGEST_MESSAGE = 2**24
"""Bytes. The longest are lists of parameters, where the ranks' lists differ."""
CHALLENGE_BYTES = 32
_HELLO = struct.Struct(">Q24s32s")
HELLO_BYTES = _HELLO.size
PROOF_BYTES = 32
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


def new_challenge() -> bytes:
    """What a server sends to whoever connects."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def hello(rank: int, challenge: bytes, key: bytes) -> bytes:
    """A rank's answer to `challenge`."""
    own = secrets.token_bytes(24)
    return _HELLO.pack(rank, own, _proof(key, b"rank", challenge, own, rank))


def authenticated_rank(said: bytes, challenge: bytes, key: bytes) -> int | None:
    """The rank that has said hello; None if it does not have the key. Constant time."""
    rank, own, proof = _HELLO.unpack(said)
    return rank if hmac.compare_digest(proof, _proof(key, b"rank", challenge, own, rank)) else None


def welcome(said: bytes, challenge: bytes, key: bytes) -> bytes:
    """The server's proof, for a rank that has said hello, that it has the key too."""
    rank, own, _ = _HELLO.unpack(said)
    return _proof(key, b"server", challenge, own, rank)


def connected(host: str, port: int, rank: int, key: bytes, timeout: float) -> socket.socket:
    """A connection to the control server, on which both sides have shown that they have `key`.

    Raises:
        OSError: There is none, or the other side does not have the key.
    """
    line = socket.create_connection((host, port), timeout=timeout)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = _received(line, CHALLENGE_BYTES)
        said = hello(rank, challenge, key)
        line.sendall(said)
        proof = _received(line, PROOF_BYTES)
        if not hmac.compare_digest(proof, welcome(said, challenge, key)):
            raise ConnectionError("who listens there does not have the key of this run")
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


def _proof(key: bytes, side: bytes, challenge: bytes, own: bytes, rank: int) -> bytes:
    return hmac.digest(key, b"/".join([side, challenge, own, str(rank).encode()]), "sha256")


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
