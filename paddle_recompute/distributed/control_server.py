"""The thread in rank 0 that every rank is connected to: who is there, who is not, who said what.

Ranks need to know three things about each other that no collective tells: that a peer has died,
stopped or failed; that it is merely late; and a small value of its own (a flag, a checksum). All
three go through here, as lines of JSON over one TCP connection per rank.

Why not Paddle's own TCP store? One of its operations takes 43 ms (2.6.2 and 3.3.1, measured between
two processes of one machine: its client writes a request in several small packets without
TCP_NODELAY), cannot be bounded in time, and blocks for ever on a store whose process is stopped.
An exchange here takes about 0.2 ms. The store only tells the ranks where the server listens.

A connection that closes is a process that has ended, and is seen at once. A process that is
stopped, or whose machine is cut off, keeps its connection and falls silent: the server counts its
own ticks since it last heard of each rank, so that a server that was itself stopped accuses nobody.

Trust: the server listens on the loopback interface where the store's address is there, else on all,
as gloo's own sockets and the store do. A connection is closed unless it begins with the token that
rank 0 has put into the store.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import secrets
import socket
import threading
from dataclasses import dataclass
from typing import Any

TICK = 1.0
"""Seconds between two signs of life."""
LONGEST_LINE = 2**28

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """One line on the wire."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


@dataclass
class _Connection:
    """The connection to one rank."""

    writer: asyncio.StreamWriter
    quiet: int = 0
    left: bool = False


class ControlServer:
    """Listens from its creation on, until the process ends.

    Args:
        host: The name under which the ranks reach this process.
    """

    def __init__(self, host: str) -> None:
        self.token = secrets.token_hex(16)
        self._lines: dict[int, _Connection] = {}
        self._troubles: list[Message] = []  # for ranks that connect later
        self._failed_scopes: set[str] = set()
        self._waiting: dict[str, dict[int, Message]] = {}
        listening = socket.create_server(("127.0.0.1" if _is_loopback(host) else "", 0))
        self.port = int(listening.getsockname()[1])
        thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listening)), name="control server", daemon=True
        )
        thread.start()

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._attend, sock=listening, limit=LONGEST_LINE)
        async with server:
            while True:
                await asyncio.sleep(TICK)
                for line in self._lines.values():
                    line.quiet += 1

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await _next(reader)
        if hello is None or not hmac.compare_digest(str(hello.get("token")), self.token):
            writer.close()
            return
        # asyncio does it only for a socket made with IPPROTO_TCP; without it an answer that follows
        # another waits 40 ms for the peer's delayed acknowledgement.
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rank = int(hello["rank"])
        line = self._lines[rank] = _Connection(writer)
        for trouble in self._troubles:
            writer.write(encode(trouble))
        while (message := await _next(reader)) is not None:
            line.quiet = 0
            self._take(rank, line, message)
        if not line.left:
            self._announce({"kind": "gone", "rank": rank})
        del self._lines[rank]
        writer.close()

    def _take(self, rank: int, line: _Connection, message: Message) -> None:
        kind = message["kind"]
        if kind == "alive":
            line.writer.write(encode(self._news_for(rank)))
        elif kind == "exchange":
            self._exchange(rank, message)
        elif kind in ("failed", "left"):
            line.left = kind == "left"
            if kind == "failed":
                self._give_up(message["scope"])
            self._announce({**message, "rank": rank})

    def _news_for(self, rank: int) -> Message:
        """Who has been silent for more than a tick, and for whom `rank` waits in each channel."""
        silent = {r: line.quiet * TICK for r, line in self._lines.items() if line.quiet > 1}
        missing = {
            channel: [r for r in arrived[rank]["ranks"] if r not in arrived]
            for channel, arrived in self._waiting.items()
            if rank in arrived
        }
        return {"kind": "alive", "silent": silent, "missing": missing}

    def _exchange(self, rank: int, message: Message) -> None:
        """Keep what `rank` has to say until all of its channel have spoken, then tell them all."""
        channel, ranks = message["channel"], message["ranks"]
        if message["scope"] in self._failed_scopes:
            return
        arrived = self._waiting.setdefault(channel, {})
        arrived[rank] = message
        if len(arrived) < len(ranks):
            return
        del self._waiting[channel]
        answer: Message = {
            "kind": "exchanged",
            "channel": channel,
            "contents": [arrived[r]["content"] for r in ranks],
        }
        labels = {r: arrived[r]["label"] for r in ranks}
        if len(set(labels.values())) > 1:
            answer["labels"] = labels
        for r in ranks:
            self._tell(r, answer)

    def _give_up(self, scope: str) -> None:
        """Forget who waits on behalf of `scope`, which has failed: they are told, and what they
        said, or will say before they hear of it, must not answer the exchange of a new start.
        """
        self._failed_scopes.add(scope)
        for arrived in self._waiting.values():
            for rank in [r for r, message in arrived.items() if message["scope"] == scope]:
                del arrived[rank]

    def _announce(self, trouble: Message) -> None:
        """Tell everybody, and last the one concerned: it may wait to end until it was heard."""
        self._troubles.append(trouble)
        for rank in sorted(self._lines, key=lambda rank: rank == trouble["rank"]):
            self._tell(rank, trouble)

    def _tell(self, rank: int, message: Message) -> None:
        line = self._lines.get(rank)
        if line is not None and not line.writer.is_closing():
            line.writer.write(encode(message))


async def _next(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None when the connection has ended, in order or not."""
    try:
        line = await reader.readline()
    except OSError:  # reset by a process that was killed
        return None
    return json.loads(line) if line.endswith(b"\n") else None


def _is_loopback(host: str) -> bool:
    addresses = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)
