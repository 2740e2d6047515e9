"""The thread in rank 0 that every rank is connected to: who is there, who is not, who failed.

Ranks need to know things about each other that no collective tells: that a peer has died, stopped
or failed, that it is merely late, and at the start whether all are set up alike. That goes through
here. What ranks agree on in every step does not: it travels in collectives of their backend.

Why not Paddle's own TCP store? One of its operations takes 43 ms (2.6.2 and 3.3.1, measured between
two processes of one machine: its client writes a request in several small packets without
TCP_NODELAY), cannot be bounded in time, and blocks for ever on a store whose process is stopped.
The store only tells the ranks where the server listens, and the key.

A connection that closes is a process that has ended, and is seen at once. A process that is
stopped, or whose machine is cut off, keeps its connection and falls silent: the server counts its
own ticks since it last heard of each rank, so that a server that was itself stopped accuses nobody.

A tick costs one byte from and to each rank. News of many ranks at once (all of them end) are joined
into one message a tick. So all costs grow with the number of ranks, none with its square.

Trust: the server listens on the address that the ranks use, loopback where they do. What strangers
can do there is bounded: they have 5 s to send `control_wire.HELLO_BYTES`, nothing of it is parsed
before it is compared, and at most `MOST_STRANGERS` connections are open at a time. A rank that does
not keep to the protocol is closed, and counts as dead.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from paddle_recompute.distributed._meetings import Meetings, Waits
from paddle_recompute.distributed.control_wire import (
    HELLO_BYTES,
    SIGN_OF_LIFE,
    Message,
    ProtocolError,
    Reader,
    encode,
    new_challenge,
    number_of,
    ranges,
    rank_of,
    text_of,
    welcome,
)

TICK = 1.0
"""Seconds between two signs of life."""
HELLO_SECONDS = 5.0
MOST_STRANGERS = 256
"""Connections that have not said who they are. More of them wait in the system's queue."""
_HELLO_SECONDS_IN_A_CROWD = 1.0
_LONGEST_BACKLOG = 2**26
"""Bytes that a rank has not read. Beyond it, the rank counts as dead."""
_LOUD = 8
"""Ends that are told at once; more of them are told together, each tick."""
_MOST_SILENT = 16
_PAUSE_PER_RANK = 20e-6


@dataclass(eq=False)
class _Stranger:
    """A connection that has not said who it is."""

    socket: socket.socket
    challenge: bytes
    since: float
    said: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Line:
    """The connection to one rank."""

    rank: int
    socket: socket.socket
    reader: Reader = field(default_factory=Reader)
    unsent: bytearray = field(default_factory=bytearray)
    quiet: int = 0
    left: bool = False


class ControlServer:
    """Listens from its creation on, until the process ends.

    Args:
        host: The name under which the ranks reach this process.
        key: Known to the ranks alone.
        num_ranks: How many there are.
    """

    def __init__(self, host: str, key: bytes, num_ranks: int) -> None:
        self._key = key
        self._num_ranks = num_ranks
        self._lines: dict[int, _Line] = {}
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._cause: list[Message] = []  # the first failure or death: it ends the run
        self._left: list[int] = []  # in good order
        self._untold: list[int] = []
        self._stops: list[Message] = []  # the last one
        self._meetings = Meetings(self._tell)
        self._waits = Waits(self._tell)
        self._news = selectors.DefaultSelector()
        self._listening = _listen(host)
        self.port = int(self._listening.getsockname()[1])
        self._listening.setblocking(False)
        self._is_open, self._is_full, self._said_silent = True, False, False
        self._is_busy = False  # there was more than signs of life
        self._news.register(self._listening, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="control server", daemon=True).start()

    def wait_until_alone(self, patience: float) -> bool:
        """Whether no process of another rank lives; waits up to `patience` seconds for that."""
        deadline = time.monotonic() + patience
        while any(rank != 0 for rank in [*self._lines]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def _serve(self) -> None:
        next_tick = time.monotonic() + TICK
        while True:
            if not self._is_busy:
                # Of many ranks, several have shown a sign of life by then: one look for all of
                # them, and the training of rank 0 is disturbed less often.
                time.sleep(_PAUSE_PER_RANK * len(self._lines))
            self._is_busy = False
            for key, events in self._news.select(max(0.0, next_tick - time.monotonic())):
                if key.data is None:
                    self._accept()
                elif isinstance(key.data, _Stranger):
                    self._hear_stranger(key.data)
                else:
                    if events & selectors.EVENT_WRITE:
                        self._send(key.data, b"")
                    if events & selectors.EVENT_READ:
                        self._hear(key.data)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK
                self._tick()

    # ----------------------------------------------------------------------------- strangers

    def _accept(self) -> None:
        self._is_busy = True
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError:  # this process has no descriptor left: not again before the next tick
            self._is_full = True
            self._mind_the_door()
            return
        connection.setblocking(False)
        stranger = _Stranger(connection, new_challenge(), time.monotonic())
        self._strangers[connection] = stranger
        self._news.register(connection, selectors.EVENT_READ, stranger)
        try:
            connection.send(stranger.challenge)
        except OSError:
            self._show_out(stranger)
        self._mind_the_door()

    def _hear_stranger(self, stranger: _Stranger) -> None:
        self._is_busy = True
        try:
            said = stranger.socket.recv(HELLO_BYTES - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        stranger.said += said
        if said and len(stranger.said) < HELLO_BYTES:
            return
        rank = None
        if said:
            rank = rank_of(bytes(stranger.said), stranger.challenge, self._key)
        if rank is None or rank >= self._num_ranks or rank in self._lines:
            self._show_out(stranger)
            return
        del self._strangers[stranger.socket]
        self._mind_the_door()
        stranger.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = self._lines[rank] = _Line(rank, stranger.socket)
        self._news.modify(line.socket, selectors.EVENT_READ, line)
        self._send(line, welcome(bytes(stranger.said), stranger.challenge, self._key))
        for message in [*self._cause, *_ends(self._left), *self._stops]:
            self._send(line, encode(message))

    def _show_out(self, stranger: _Stranger) -> None:
        if self._strangers.pop(stranger.socket, None) is not None:
            self._news.unregister(stranger.socket)
            stranger.socket.close()
            self._mind_the_door()

    def _mind_the_door(self) -> None:
        """Accept nobody while too many strangers are here."""
        is_open = len(self._strangers) < MOST_STRANGERS and not self._is_full
        if is_open != self._is_open:
            self._is_open = is_open
            if is_open:
                self._news.register(self._listening, selectors.EVENT_READ)
            else:
                self._news.unregister(self._listening)

    # --------------------------------------------------------------------------------- ranks

    def _hear(self, line: _Line) -> None:
        try:
            data = line.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:  # reset by a process that was killed
            data = b""
        line.quiet = 0
        if data == SIGN_OF_LIFE:
            return
        self._is_busy = True
        try:
            if not data:
                raise ProtocolError("it has ended")
            for message in line.reader.feed(data):
                self._take(line, message)
        except ProtocolError:
            self._hang_up(line)

    def _take(self, line: _Line, message: Message) -> None:
        kind, rank = message["kind"], line.rank
        if kind == "meet":
            self._meetings.come(
                rank,
                text_of(message, "channel"),
                number_of(message, "size"),
                text_of(message, "label"),
                text_of(message, "digest"),
                message.get("everything") is True,
            )
        elif kind == "content":
            self._meetings.take_content(rank, text_of(message, "channel"), message.get("content"))
        elif kind == "waits":
            self._waits.begin(
                rank,
                text_of(message, "among"),
                number_of(message, "size"),
                number_of(message, "serial"),
                text_of(message, "place"),
                text_of(message, "label"),
            )
        elif kind == "goes on":
            self._waits.end(rank)
        elif kind == "stop":
            self._pass_stop_on(number_of(message, "number"))
        elif kind == "failed":
            self._end_run(
                {
                    "kind": "failed",
                    "rank": rank,
                    "place": text_of(message, "place"),
                    "message": text_of(message, "message"),
                }
            )
        elif kind == "left":
            self._note_left(rank, text_of(message, "place"))
            line.left = True
            self._send(line, encode({"kind": "heard"}))
        else:
            raise ProtocolError(f"no such message: {kind}")

    def _end_run(self, cause: Message) -> None:
        """Tell all ranks, once, what ends the run; whatever fails later is a consequence."""
        if not self._cause:
            self._cause = [cause]
            self._tell_all(cause)

    def _pass_stop_on(self, number: int) -> None:
        """Once: a scheduler that ends a run asks all ranks."""
        told: Message = {"kind": "stop", "number": number}
        if told not in self._stops:
            self._stops = [told]
            self._tell_all(told)

    def _hang_up(self, line: _Line) -> None:
        if self._lines.pop(line.rank, None) is None:
            return
        self._waits.end(line.rank)
        self._news.unregister(line.socket)
        line.socket.close()
        if not line.left:
            self._end_run({"kind": "gone", "rank": line.rank, "place": ""})

    def _note_left(self, rank: int, place: str) -> None:
        """Tell of the first ends at once, of more of them together; of none after the cause."""
        if self._cause:
            return
        self._left.append(rank)
        if len(self._left) <= _LOUD:
            self._tell_all({"kind": "left", "ranks": str(rank), "place": place})
        else:
            self._untold.append(rank)

    # ------------------------------------------------------------------------------- telling

    def _tick(self) -> None:
        patience = HELLO_SECONDS if self._is_open else _HELLO_SECONDS_IN_A_CROWD
        for stranger in [*self._strangers.values()]:
            if time.monotonic() - stranger.since > patience:
                self._show_out(stranger)
        self._is_full = False
        self._mind_the_door()
        self._waits.tick()
        for message in _ends(self._untold):
            self._tell_all(message)
        self._untold = []
        silent = {}
        for line in self._lines.values():
            line.quiet += 1
            if line.quiet > 2:
                silent[line.rank] = line.quiet * TICK
        if silent:
            longest = sorted(silent.items(), key=lambda item: -item[1])[:_MOST_SILENT]
            self._tell_all({"kind": "silent", "seconds": {str(r): s for r, s in longest}})
        elif self._said_silent:
            self._tell_all({"kind": "silent", "seconds": {}})
        self._said_silent = bool(silent)
        for line in [*self._lines.values()]:
            self._send(line, SIGN_OF_LIFE)

    def _tell_all(self, message: Message) -> None:
        data = encode(message)
        for line in [*self._lines.values()]:
            self._send(line, data)

    def _tell(self, rank: int, message: Message) -> None:
        line = self._lines.get(rank)
        if line is not None:
            self._send(line, encode(message))

    def _send(self, line: _Line, data: bytes) -> None:
        """Send what the system takes now, and the rest when it can take more."""
        waits = bool(line.unsent)
        if waits:
            line.unsent += data
        try:
            sent = line.socket.send(line.unsent if waits else data)
        except BlockingIOError:
            sent = 0
        except OSError:  # closed by the other side: what it said last is still to be read
            line.unsent.clear()
            return
        if waits:
            del line.unsent[:sent]
        elif sent < len(data):
            line.unsent += data[sent:]
        if len(line.unsent) > _LONGEST_BACKLOG:
            self._hang_up(line)
        elif bool(line.unsent) != waits:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            with contextlib.suppress(KeyError):
                self._news.modify(line.socket, both if line.unsent else selectors.EVENT_READ, line)


def _ends(ranks: list[int]) -> list[Message]:
    return [{"kind": "left", "ranks": ranges(ranks), "place": ""}] if ranks else []


def _listen(host: str) -> socket.socket:
    """Listen where `host` leads; where that is no address of this machine, as behind a NAT, on
    all of them.
    """
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with contextlib.suppress(OSError):
            return _listening_at(family, kind, (str(address[0]), 0))
    return _listening_at(socket.AF_INET, socket.SOCK_STREAM, ("", 0))


def _listening_at(family: int, kind: int, address: tuple[str, int]) -> socket.socket:
    listening = socket.socket(family, kind)
    try:
        listening.bind(address)
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening
