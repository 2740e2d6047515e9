"""The protocol of the control connection: the handshake, signs of life, messages.

A message is a line of JSON, and a sign of life is an empty line. The first message of a rank is
`hello`, with the name of the run and a nonce. The server answers with a nonce of its own and the
proof that it has the secret of the run; the rank proves the same. The last answer is one byte:
`ACCEPTED`, or `REFUSED` to a rank with another secret. The server closes the connection after
`REFUSED`, to a process of another run, and after whatever is no message.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from typing import Any, NamedTuple

Message = dict[str, Any]

SIGN_OF_LIFE = b"\n"
LONGEST_MESSAGE = 2**24
"""Bytes. The longest are lists of parameters, where the ranks' lists differ."""
ACCEPTED, REFUSED = b"+", b"-"
NONCE, PROOF = 16, 32
"""Bytes."""


class ProtocolError(Exception):
    """The other side does not keep to the protocol; its connection is to be closed."""


class KeyRefusedError(ConnectionError):
    """The server has another key."""


class RunKey(NamedTuple):
    """What the ranks of one run have in common.

    Attributes:
        run: The name of the run, sent in clear.
        secret: Never sent: each side proves by HMAC that it has it.
    """

    run: str
    secret: bytes

    def proof(self, role: bytes, *nonces: bytes) -> bytes:
        """That `role`, ``b"rank"`` or ``b"server"``, has the secret."""
        return hmac.digest(self.secret, role + b"".join(nonces), "sha256")


def hello(rank: int, key: RunKey, nonce: bytes, host: str = "") -> bytes:
    """The first message of `rank`."""
    told = {"rank": rank, "host": host, "run": key.run, "nonce": nonce.hex()}
    return encode({"kind": "hello", **told})


def introduce(line: socket.socket, rank: int, key: RunKey, host: str = "") -> None:
    """Let the control server at the other end of `line` accept `rank`. Errors as of `connected`."""
    own = secrets.token_bytes(NONCE)
    line.sendall(hello(rank, key, own, host))
    with line.makefile("rb") as answers:  # the server says no more before it has our proof
        theirs, proof = answers.read(NONCE), answers.read(PROOF)
    line.sendall(key.proof(b"rank", own, theirs))
    answer = line.recv(1)
    if answer not in (ACCEPTED, REFUSED):
        raise ConnectionError("it closed the connection")
    if answer == REFUSED or not hmac.compare_digest(proof, key.proof(b"server", own, theirs)):
        raise KeyRefusedError("it has another key")


def connected(host: str, port: int, rank: int, key: RunKey, timeout: float) -> socket.socket:
    """A connection to the control server that has accepted this rank.

    Raises:
        KeyRefusedError: The server has another key.
        OSError: There is no server, or it does not accept this rank.
    """
    line = socket.create_connection((host, port), timeout=timeout)
    try:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduce(line, rank, key, socket.gethostname())
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
