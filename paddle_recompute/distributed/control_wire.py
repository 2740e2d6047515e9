"""What travels on the control connection: the handshake, signs of life, messages.

Whoever connects gets a challenge, and has to answer it with 64 bytes: its rank, a challenge of its
own, and an HMAC-SHA256 of all of them under the key of the run. They are compared before anything
is parsed, and the key does not travel. The server answers the rank's challenge in the same way, so
that no rank talks to a stranger who has taken the port.

Afterwards a sign of life is one byte, and a message is a byte, its length in four bytes, and JSON.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

SIGN_OF_LIFE = b"\0"
_MESSAGE = b"\1"
_LENGTH = struct.Struct(">I")
LONGEST_MESSAGE = 2**24
"""Bytes. The longest are lists of parameters, where the ranks' lists differ."""

CHALLENGE_BYTES = 32
_HELLO = struct.Struct(">Q24s32s")
HELLO_BYTES = _HELLO.size
PROOF_BYTES = 32


class ProtocolError(Exception):
    """The other side does not keep to the protocol; its connection is to be closed."""


def new_challenge() -> bytes:
    """What a server sends to whoever connects."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def hello(rank: int, challenge: bytes, key: bytes) -> bytes:
    """A rank's answer to `challenge`."""
    own = secrets.token_bytes(24)
    return _HELLO.pack(rank, own, _proof(key, b"rank", challenge, own, rank))


def rank_of(said: bytes, challenge: bytes, key: bytes) -> int | None:
    """The rank that has said hello; None for a stranger. Constant time."""
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
    content = json.dumps(message, separators=(",", ":")).encode()
    return _MESSAGE + _LENGTH.pack(len(content)) + content


class Reader:
    """Cuts what has arrived into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with `data`; signs of life are left out.

        Raises:
            ProtocolError: It is none of ours.
        """
        if data == SIGN_OF_LIFE and not self._received:
            return []
        self._received += data
        messages = []
        while self._received:
            if self._received[:1] == SIGN_OF_LIFE:
                del self._received[:1]
                continue
            if self._received[:1] != _MESSAGE:
                raise ProtocolError("neither a sign of life nor a message")
            if len(self._received) < 5:
                break
            (length,) = _LENGTH.unpack(self._received[1:5])
            if length > LONGEST_MESSAGE:
                raise ProtocolError(f"a message of {length} bytes")
            if len(self._received) < 5 + length:
                break
            messages.append(_parsed(bytes(self._received[5 : 5 + length])))
            del self._received[: 5 + length]
        return messages


def _parsed(content: bytes) -> Message:
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError("not a message")
    return message


def text_of(message: Message, name: str) -> str:
    """A field that must be a text.

    Raises:
        ProtocolError: It is not there, or something else.
    """
    value = message.get(name)
    if not isinstance(value, str):
        raise ProtocolError(f"{name} is not a text")
    return value


def number_of(message: Message, name: str) -> int:
    """A field that must be a whole number that is not negative.

    Raises:
        ProtocolError: It is not there, or something else.
    """
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ProtocolError(f"{name} is not a number")
    return value


def ranges(ranks: Sequence[int]) -> str:
    """Ranks in few characters: ``0-1023``, ``0-3,7``, ``0-1016:8`` (each eighth)."""
    told: list[str] = []
    place = 0
    ordered = sorted(ranks)
    while place < len(ordered):
        stride = ordered[place + 1] - ordered[place] if place + 1 < len(ordered) else 1
        end = place
        while end + 1 < len(ordered) and ordered[end + 1] - ordered[end] == stride:
            end += 1
        if stride > 1 and end - place < 2:  # two of them are no series
            end = place
        first, last = ordered[place], ordered[end]
        if first == last:
            told.append(str(first))
        else:
            told.append(f"{first}-{last}" + (f":{stride}" if stride > 1 else ""))
        place = end + 1
    return ",".join(told)


def ranks_in(told: str) -> list[int]:
    """The ranks that `ranges` has written down."""
    ranks: list[int] = []
    for part in filter(None, told.split(",")):
        series, _, stride = part.partition(":")
        first, _, last = series.partition("-")
        ranks += range(int(first), int(last or first) + 1, int(stride or 1))
    return ranks
