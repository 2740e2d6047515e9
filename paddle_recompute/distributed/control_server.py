"""The thread in rank 0 that every rank is connected to: who is there, who is not, who failed.

Ranks need to know things about each other that no collective tells: that a peer has died, stopped
or failed, that it is merely late, and at the start whether all are set up alike. That goes through
here. What ranks agree on in every step does not: it is sent in collectives of their backend.

Why not Paddle's own TCP store? One of its operations takes 43 ms (2.6.2 and 3.3.1, measured between
two processes of one machine: its client writes a request in several small packets without
TCP_NODELAY), cannot be bounded in time, and blocks for ever on a store whose process is stopped.
The store only tells the ranks where the server listens, and the key.

A connection that closes is a process that has ended, and is seen at once. A process that is
stopped, or whose machine is cut off, keeps its connection and falls silent: the server counts its
own ticks since it last heard of each rank, so a suspended server reports no false timeouts.
A tick costs one byte from and to each rank.

Trust: the server listens on the address that the ranks use, loopback where they do, and no longer
when all ranks have connected. A connection has `HELLO_SECONDS` to send a `hello` of a missing rank
of this run and to prove that it has the key; no message is longer than
`control_wire.LONGEST_MESSAGE`. All else closes the connection, a process of another run with a
warning. A rank whose connection is closed counts as dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import threading
import warnings
from asyncio import StreamReader, StreamWriter

from paddle_recompute.distributed import control_wire as wire
from paddle_recompute.distributed._exchanges import Exchanges, Waits
from paddle_recompute.distributed.control_wire import Message, RunKey

TICK = 1.0
"""Seconds between two signs of life."""
HELLO_SECONDS = 5.0
_KEY_TICKS = 5
"""Ticks that a rank has to connect with the right key after a process of this run that had its
number had another.
"""
_MOST_SILENT = 16


class ControlServer:
    """Listens from its creation on, until all ranks have connected.

    Args:
        host: The name under which the ranks reach this process.
        key: Of the run; its secret is known to the ranks alone.
        num_ranks: How many there are.
        port: Where to listen; 0: any port.
        patience: Seconds for all ranks to connect; None: no limit.
    """

    def __init__(
        self,
        host: str,
        key: RunKey,
        num_ranks: int,
        *,
        port: int = 0,
        patience: float | None = None,
    ) -> None:
        self._key = key
        self._num_ranks = num_ranks
        self._ticks_to_connect = patience and patience / TICK
        self._lines: dict[int, StreamWriter] = {}
        self._hosts: dict[int, str] = {}  # of all ranks that have ever connected
        self._quiet: dict[int, int] = {}  # ticks, by rank
        self._refused: dict[int, tuple[int, str]] = {}  # ticks since, and host
        self._cause: list[Message] = []  # the first failure or death: it ends the run
        self._left: dict[int, str] = {}  # in good order, and where
        self._untold: dict[int, str] = {}
        self._said_silent = self._has_warned = False
        self._exchanges = Exchanges(self._tell)
        self._waits = Waits(self._tell)
        self._listening = _listen(host, port)
        self.port = int(self._listening.getsockname()[1])
        serve = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="control server", daemon=True
        )
        serve.start()

    def is_alone(self) -> bool:
        """Whether no process of another rank lives."""
        return not any(rank != 0 for rank in [*self._lines])

    async def _serve(self) -> None:
        # Where no descriptor is left, asyncio reports it here and accepts again a second later.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        self._door = await asyncio.start_server(
            self._answer, sock=self._listening, limit=wire.LONGEST_MESSAGE, backlog=1024
        )
        while True:
            await asyncio.sleep(TICK)
            self._tick()

    async def _answer(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one connection until it ends."""
        rank = None
        try:
            rank = await asyncio.wait_for(self._authenticate(reader, writer), HELLO_SECONDS)
            if rank is None:
                return
            async for line in reader:
                self._quiet[rank] = 0
                if line != wire.SIGN_OF_LIFE:
                    self._take(rank, wire.decode(line))
        except (OSError, EOFError, asyncio.TimeoutError, wire.ProtocolError):
            pass
        except (ValueError, LookupError, TypeError, AttributeError):
            pass  # a line that is too long, or a message without what belongs into it
        finally:
            if rank is not None:
                self._note_end(rank)
            writer.close()

    async def _authenticate(self, reader: StreamReader, writer: StreamWriter) -> int | None:
        """The rank that has connected; None if it is none that is missing."""
        hello = wire.decode(await reader.readline())
        rank, host, run = hello["rank"], str(hello["host"])[:64], hello["run"]
        if type(rank) is not int or not 0 <= rank < self._num_ranks:
            return None
        if run != self._key.run:
            self._warn_once(rank, host)
            return None
        theirs, own = bytes.fromhex(hello["nonce"]), secrets.token_bytes(wire.NONCE)
        writer.write(own + self._key.proof(b"server", theirs, own))
        proof = await reader.readexactly(wire.PROOF)
        if rank in self._lines:
            return None
        if not hmac.compare_digest(proof, self._key.proof(b"rank", theirs, own)):
            writer.write(wire.REFUSED)
            self._refused.setdefault(rank, (0, host))
            return None
        self._lines[rank], self._quiet[rank], self._hosts[rank] = writer, 0, host
        self._refused.pop(rank, None)
        writer.write(wire.ACCEPTED)
        for message in [*self._cause, *_ends(self._left)]:
            self._tell(rank, message)
        if len(self._hosts) == self._num_ranks:
            self._door.close()
            hosts = {str(known_rank): host for known_rank, host in self._hosts.items()}
            self._tell_all({"kind": "hosts", "hosts": hosts})
        return rank

    def _warn_once(self, rank: int, host: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"a process on {host!r} has connected to the control port of this run as rank "
                f"{rank} of another run (another PADDLE_MASTER or PADDLE_TRAINER_ENDPOINTS); it "
                "was not let in, and this run waits for its own ranks",
                stacklevel=2,
            )

    def _take(self, rank: int, message: Message) -> None:
        match message["kind"]:
            case "arrive":
                self._exchanges.arrive(rank, message)
            case "waits":
                self._waits.begin(rank, message)
            case "wait ended":
                self._waits.end(rank)
            case "failed":
                self._end_run({**message, "rank": rank})
            case "left":
                self._left[rank] = self._untold[rank] = message["phase"]
                if rank == 0:  # the server ends with it
                    self._tell_ends()
                self._tell(rank, {"kind": "heard"})
                self._tell_if_over()
            case kind:
                raise wire.ProtocolError(f"no second {kind}")

    def _end_run(self, cause: Message) -> None:
        """Tell all ranks, once, what ends the run; whatever fails later is a consequence."""
        if not self._cause:
            self._cause = [{**cause, "host": self._hosts.get(cause["rank"], cause.get("host", ""))}]
            self._tell_all(self._cause[0])

    def _tell_if_over(self) -> None:
        """Tell those who wait for it that all ranks know of the failure, and end."""
        came = self._left.keys() | self._hosts.keys() | self._refused.keys()
        ended = self._left.keys() | (came - self._lines.keys())
        expected = len(came) if self._ticks_to_connect == 0 else self._num_ranks
        if self._cause and len(ended) == expected:
            self._tell_all({"kind": "over"})

    def _note_end(self, rank: int) -> None:
        del self._lines[rank], self._quiet[rank]
        self._waits.end(rank)
        if rank not in self._left:
            self._end_run({"kind": "gone", "rank": rank, "phase": ""})
        self._tell_if_over()

    def _tell_ends(self) -> None:
        for message in _ends(self._untold) if not self._cause else ():
            self._tell_all(message)
        self._untold = {}

    def _tick(self) -> None:
        self._waits.tick()
        self._tell_ends()
        self._check_missing()
        silent = {}
        for rank in self._quiet:
            self._quiet[rank] += 1
            if self._quiet[rank] > 2:
                silent[rank] = self._quiet[rank] * TICK
        if silent or self._said_silent:
            longest = sorted(silent.items(), key=lambda item: -item[1])[:_MOST_SILENT]
            self._tell_all({"kind": "silent", "seconds": {str(r): s for r, s in longest}})
        self._said_silent = bool(silent)
        for writer in [*self._lines.values()]:
            self._send(writer, wire.SIGN_OF_LIFE)

    def _check_missing(self) -> None:
        """End the run if a rank has another key, or if ranks do not connect in time."""
        for rank, (ticks, host) in [*self._refused.items()]:
            self._refused[rank] = (ticks + 1, host)
            if ticks == _KEY_TICKS:
                self._end_run({"kind": "refused", "rank": rank, "phase": "", "host": host})
        if self._ticks_to_connect and len(self._hosts) < self._num_ranks:
            self._ticks_to_connect -= 1
            if self._ticks_to_connect <= 0:
                self._ticks_to_connect = 0
                rank = min({*range(self._num_ranks)} - self._hosts.keys())
                self._end_run({"kind": "absent", "rank": rank, "phase": ""})

    def _tell_all(self, message: Message) -> None:
        data = wire.encode(message)
        for writer in [*self._lines.values()]:
            self._send(writer, data)

    def _tell(self, rank: int, message: Message) -> None:
        if rank in self._lines:
            self._send(self._lines[rank], wire.encode(message))

    def _send(self, writer: StreamWriter, data: bytes) -> None:
        if not writer.is_closing():
            writer.write(data)


def _ends(phases: dict[int, str]) -> list[Message]:
    of_ranks = {str(rank): phase for rank, phase in phases.items()}
    return [{"kind": "left", "phases": of_ranks}] if of_ranks else []


def _listen(host: str, port: int) -> socket.socket:
    """Listen where `host` leads; where that is no address of this machine, as behind a NAT, on
    all of them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError):
        return socket.create_server((host, port), family=family, backlog=1024)
    return socket.create_server(("", port), backlog=1024)
