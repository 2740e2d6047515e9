"""What strangers can do at the control port of a run: resident memory of rank 0, before and after.

Rank 0's server runs in a process of its own, with two ranks on the line. Each attack goes on until
the server has closed its connections, or for ten seconds. Afterwards the two ranks must meet, and
the process must have printed nothing.

    python -m benchmarks.control_port            # about one minute
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks._record import table, write_record
from paddle_recompute.distributed import control_wire as wire

KEY = b"benchmark" * 4
LONGEST = 10.0
MIB = 2**20


@dataclass(frozen=True)
class Outcome:
    """What became of an attack.

    Attributes:
        sent: Bytes that the attacker got rid of.
        closed: How many of his connections the server closed in time, of how many.
        seconds: Until the last was closed.
        before: Resident memory of rank 0, MiB.
        peak: The same, at its highest during the attack.
        after: The same, afterwards.
        meets: Milliseconds that the ranks took to meet afterwards.
    """

    sent: int
    closed: str
    seconds: float
    before: float
    peak: float
    after: float
    meets: float


class Rank0:
    """The process with the server, and two ranks on the line."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _RANK_0, KEY.hex()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self._ranks = [self.connected(rank) for rank in (0, 1)]

    def connected(self, rank: int) -> socket.socket:
        """A line of `rank`, which has the key."""
        return wire.connected("127.0.0.1", self.port, rank, KEY, 10.0)

    def resident(self, what: str = "VmRSS") -> float:
        """MiB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(what))
        return int(line.split()[1]) / 1024

    def forget_peak(self) -> None:
        """So that ``VmHWM`` is that of what follows."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def meet(self) -> float:
        """Milliseconds that a meeting of the two ranks takes."""
        began = time.perf_counter()
        told = {"channel": "0-1/main", "size": 2, "scope": "s", "label": "x", "digest": "d"}
        for line in self._ranks:
            line.sendall(wire.encode({"kind": "meet", "clean": True, **told}))
        for line in self._ranks:
            reader = wire.Reader()
            while not any(m["kind"] == "met" for m in reader.feed(line.recv(1 << 16))):
                line.sendall(wire.SIGN_OF_LIFE)
        return (time.perf_counter() - began) * 1e3

    def end(self) -> str:
        """Kill the process; returns what it has printed."""
        self._process.kill()  # Paddle writes a report on any other signal
        out, error = self._process.communicate(timeout=10)
        return (out + error).decode()


_RANK_0 = """
import resource, sys, time
import paddle
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
from paddle_recompute.distributed.control_server import ControlServer
server = ControlServer("127.0.0.1", bytes.fromhex(sys.argv[1]), 8)
sys.stderr.flush()
print(server.port, flush=True)
time.sleep(600)
"""


def _push(lines: list[socket.socket], piece: bytes, most: int) -> int:
    """Send `piece` over all lines again and again; returns the bytes that were taken."""
    sent, deadline = 0, time.monotonic() + LONGEST
    open_lines = list(lines)
    for line in lines:
        line.setblocking(False)
    while open_lines and sent < most and time.monotonic() < deadline:
        for line in list(open_lines):
            try:
                sent += line.send(piece)
            except BlockingIOError:
                time.sleep(0.0005)
            except OSError:
                open_lines.remove(line)
    return sent


def _strangers(rank0: Rank0, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", rank0.port)) for _ in range(count)]


def _nested_brackets(rank0: Rank0) -> tuple[list[socket.socket], int]:
    lines = _strangers(rank0, 4)
    return lines, _push(lines, b"[" * MIB, 4 * 256 * MIB)


def _long_line(rank0: Rank0) -> tuple[list[socket.socket], int]:
    lines = _strangers(rank0, 1)
    return lines, _push(lines, b"a" * MIB, 256 * MIB)


def _slow_hello(rank0: Rank0) -> tuple[list[socket.socket], int]:
    lines, sent = _strangers(rank0, 100), 0
    for _ in range(4):
        for line in lines:
            with contextlib.suppress(OSError):
                sent += line.send(b"x")
        time.sleep(1.0)
    return lines, sent


def _thousand_connections(rank0: Rank0) -> tuple[list[socket.socket], int]:
    return _strangers(rank0, 1000), 0


def _wrong_key(rank0: Rank0) -> tuple[list[socket.socket], int]:
    lines, sent = _strangers(rank0, 200), 0
    for line in lines:
        challenge = line.recv(wire.CHALLENGE_BYTES)
        sent += line.send(wire.hello(2, challenge, secrets.token_bytes(32)))
    return lines, sent


def _overheard_hello(rank0: Rank0) -> tuple[list[socket.socket], int]:
    lines, sent = _strangers(rank0, 50), 0
    overheard = wire.hello(2, lines[0].recv(wire.CHALLENGE_BYTES), KEY)
    for line in lines[1:]:
        line.recv(wire.CHALLENGE_BYTES)
        sent += line.send(overheard)
    return lines[1:], sent


def _garbage_after_the_door(rank0: Rank0) -> tuple[list[socket.socket], int]:
    lines, sent = [], 0
    for piece in (b"\7" * MIB, b"\1\xff\xff\xff\xff" + b"[" * MIB):
        line = rank0.connected(2 + len(lines))
        sent += _push([line], piece, 256 * MIB)
        lines.append(line)
    return lines, sent


def _nested_after_the_door(rank0: Rank0) -> tuple[list[socket.socket], int]:
    size = wire.LONGEST_MESSAGE
    line = rank0.connected(4)
    sent = len(wire.SIGN_OF_LIFE)
    with contextlib.suppress(OSError):
        line.sendall(b"\1" + size.to_bytes(4, "big") + b"[" * size)
        sent = size
    return [line], sent


ATTACKS: dict[str, Callable[[Rank0], tuple[list[socket.socket], int]]] = {
    "nested brackets, 4 connections of up to 256 MB": _nested_brackets,
    "one line of 256 MB": _long_line,
    "slow hello: 100 connections, a byte a second": _slow_hello,
    "1,000 connections that say nothing": _thousand_connections,
    "wrong key, 200 times": _wrong_key,
    "an overheard hello, 49 times": _overheard_hello,
    "with the key: garbage, and a message of 4 GB": _garbage_after_the_door,
    "with the key: 16 MB of nested brackets": _nested_after_the_door,
}


def attack(rank0: Rank0, how: Callable[[Rank0], tuple[list[socket.socket], int]]) -> Outcome:
    """Attack, wait until the server has closed all connections, and look at rank 0."""
    rank0.meet()
    before = rank0.resident()
    rank0.forget_peak()
    began = time.monotonic()
    lines, sent = how(rank0)
    closed = 0
    for line in lines:
        line.setblocking(True)
        line.settimeout(max(0.05, began + 2 * LONGEST - time.monotonic()))
        try:
            while line.recv(1 << 16):
                pass
            closed += 1
        except TimeoutError:
            pass
        except OSError:
            closed += 1
    seconds = time.monotonic() - began
    meets = rank0.meet()
    outcome = Outcome(
        sent,
        f"{closed} of {len(lines)}",
        seconds,
        before,
        rank0.resident("VmHWM"),
        rank0.resident(),
        meets,
    )
    for line in lines:
        line.close()
    return outcome


def main() -> None:
    """Make all attacks, one after the other on one process, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-record", action="store_true", help="print the table only")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    rank0 = Rank0()
    rows = []
    for name, how in ATTACKS.items():
        one = attack(rank0, how)
        rows.append(
            [
                name,
                f"{one.sent / MIB:.1f}",
                one.closed,
                f"{one.seconds:.1f}",
                f"{one.before:.0f}",
                f"{one.peak:.0f}",
                f"{one.after:.0f}",
                f"{one.meets:.1f}",
            ]
        )
    printed = rank0.end()
    body = [
        "Resident memory is that of a process with Paddle and rank 0's control server. The old "
        "server (commit e830747) read and parsed lines of up to 256 MB before it compared the "
        "token: four connections with nested brackets took rank 0 from 0.4 to 6.8 GB.",
        "",
        *table(
            [
                "attack",
                "MB that were taken",
                "connections closed",
                "s until the last was",
                "MiB before",
                "peak",
                "after",
                "ms in which two ranks meet then",
            ],
            rows,
        ),
        "",
        f"Printed by rank 0 meanwhile: {json.dumps(printed.strip()) if printed.strip() else '-'}",
    ]
    if options.no_record:
        print("\n".join(body))
        return
    path = write_record(
        "control_port", "Strangers at the control port", "make bench-control_port", body
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
