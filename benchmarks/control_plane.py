"""What the ranks' control connection costs rank 0: at the start, in a step, and while they live.

Rank 0's server runs in this process, as it does in a training. 2 to 1,024 ranks are simulated by
the sockets of one other process. Measured are the processor time of this process, which a training
would share, and what goes through its sockets.

"Before" is the algorithm that was replaced: each rank sent its label, its content and a list of all
ranks, each answer had all contents, and a step made four such exchanges on any backend, and one
more for each bucket on gloo. Its figures were measured in the same way, with the code of commit
e830747, on the machine that the record names; the code is gone.

    python -m benchmarks.control_plane            # about one minute
"""

from __future__ import annotations

import argparse
import json
import resource
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from benchmarks._record import table, write_record
from paddle_recompute.distributed import control_wire as wire
from paddle_recompute.distributed.control_server import ControlServer

SIZES = (2, 8, 64, 256, 1024)
SECONDS_OF_LIFE = 10
EXCHANGES_OF_A_STEP = 4
MEETINGS_OF_A_START = 6
"""`GradientSync` and `TrainStep` on gloo: the making of one, its options, its parameters, and the
making of a group: three more.
"""
KEY = b"benchmark" * 4


@dataclass(frozen=True)
class Before:
    """One exchange of the old algorithm; seconds, bytes, and a share of a core."""

    seconds: float
    processor: float
    num_bytes: int
    signs: float


BEFORE = {
    2: Before(0.20e-3, 0.05e-3, 633, 0.0004),
    8: Before(0.39e-3, 0.18e-3, 4_879, 0.0007),
    64: Before(5.02e-3, 2.11e-3, 228_448, 0.0022),
    256: Before(60.96e-3, 23.18e-3, 3_678_464, 0.0076),
    1024: Before(596.33e-3, 301.92e-3, 59_638_784, 0.0486),
}


@dataclass(frozen=True)
class After:
    """The server with some number of ranks.

    Attributes:
        start: Seconds until all ranks are in and have met as often as they do at a start.
        processor: Of them, processor time of rank 0.
        num_bytes: Through rank 0, at the start.
        signs: Share of a core of rank 0 that signs of life take.
        bytes_of_life: Through rank 0, a second.
    """

    start: float
    processor: float
    num_bytes: int
    signs: float
    bytes_of_life: float


class _Crowd:
    """The sockets of all ranks, in a process of their own."""

    def __init__(self, port: int, size: int) -> None:
        self.num_bytes = 0
        self._lines = []
        for rank in range(size):
            self._lines.append(self._introduced(port, rank))
        self._readers = [wire.Reader() for _ in self._lines]
        self._news = selectors.DefaultSelector()
        for rank, line in enumerate(self._lines):
            self._news.register(line, selectors.EVENT_READ, rank)

    def _introduced(self, port: int, rank: int) -> socket.socket:
        line = wire.connected("127.0.0.1", port, rank, KEY, 30.0)
        self.num_bytes += wire.CHALLENGE_BYTES + wire.HELLO_BYTES + wire.PROOF_BYTES
        return line

    def arrive(self, label: str) -> None:
        """All ranks meet; returns when all have the answer."""
        told = {"kind": "arrive", "channel": f"{'c' * 16}/main", "label": label, "most": 8}
        for line in self._lines:
            message = wire.encode(told | {"size": len(self._lines), "value": "d" * 64})
            line.sendall(message)
            self.num_bytes += len(message)
        waiting = len(self._lines)
        while waiting:
            waiting -= sum(message["kind"] == "met" for message in self.read(1.0))

    def read(self, patience: float) -> list[wire.Message]:
        """What arrives in one look at all lines."""
        messages: list[wire.Message] = []
        for key, _ in self._news.select(patience):
            data = self._lines[key.data].recv(1 << 16)
            self.num_bytes += len(data)
            messages += self._readers[key.data].feed(data)
        return messages

    def live(self, seconds: float) -> None:
        """Show signs of life, each rank once a second, evenly spread."""
        size = len(self._lines)
        began, sent = time.monotonic(), 0
        while (passed := time.monotonic() - began) < seconds:
            while sent < passed * size:
                self._lines[sent % size].send(wire.SIGN_OF_LIFE)
                self.num_bytes += 1
                sent += 1
            self.read(0.005)


def simulate(port: int, size: int) -> None:
    """The other process: does what it is told on standard input."""
    crowd = _Crowd(port, size)
    for number in range(MEETINGS_OF_A_START):
        crowd.arrive(f"meeting {number} of the start")
    _say(crowd)
    crowd.num_bytes = 0
    crowd.live(SECONDS_OF_LIFE)
    _say(crowd)


def _say(crowd: _Crowd) -> None:
    print(json.dumps(crowd.num_bytes), flush=True)
    sys.stdin.readline()


def measure(size: int) -> After:
    """Start the server and `size` ranks, and let them live for some seconds."""
    server = ControlServer("127.0.0.1", KEY, size)
    ranks = subprocess.Popen(
        [sys.executable, "-c", _SIMULATION.format(port=server.port, size=size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert ranks.stdin is not None and ranks.stdout is not None
    ranks.stdout.readline()  # Python has started
    began, processor = time.perf_counter(), time.process_time()
    ranks.stdin.write("\n")
    ranks.stdin.flush()
    num_bytes = json.loads(ranks.stdout.readline())
    start, start_processor = time.perf_counter() - began, time.process_time() - processor
    processor = time.process_time()
    ranks.stdin.write("\n")
    ranks.stdin.flush()
    bytes_of_life = json.loads(ranks.stdout.readline())
    signs = (time.process_time() - processor) / SECONDS_OF_LIFE
    ranks.stdin.close()
    ranks.wait()
    return After(start, start_processor, num_bytes, signs, bytes_of_life / SECONDS_OF_LIFE)


_SIMULATION = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
from benchmarks import control_plane
print("started", flush=True)
sys.stdin.readline()
control_plane.simulate({port}, {size})
"""


def _rows(measured: dict[int, After]) -> tuple[list[list[str]], list[list[str]]]:
    steps, rest = [], []
    for size, after in measured.items():
        before = BEFORE[size]
        steps.append(
            [
                f"{size:,}",
                f"{EXCHANGES_OF_A_STEP * before.seconds * 1e3:,.1f}",
                f"{EXCHANGES_OF_A_STEP * before.processor * 1e3:,.1f}",
                f"{EXCHANGES_OF_A_STEP * before.num_bytes:,}",
                "0",
                "0",
                "0",
            ]
        )
        rest.append(
            [
                f"{size:,}",
                f"{after.start:.2f}",
                f"{after.processor:.2f}",
                f"{after.num_bytes:,}",
                f"{before.signs * 100:.2f}",
                f"{after.signs * 100:.2f}",
                f"{after.bytes_of_life:,.0f}",
            ]
        )
    return steps, rest


def main() -> None:
    """Measure all sizes, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-record", action="store_true", help="print the tables only")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    measured = {size: measure(size) for size in SIZES}
    steps, rest = _rows(measured)
    body = [
        "## One step that goes well, through rank 0",
        "",
        f"Before: {EXCHANGES_OF_A_STEP} exchanges (commit e830747; one more for each bucket on "
        "gloo). After: the ranks agree in one small collective of their backend, behind the "
        "buckets. `tests/grad_sync/test_agreement.py` counts the messages of whole steps: 0.",
        "",
        *table(
            [
                "ranks",
                "before: ms",
                "of them processor",
                "bytes",
                "after: ms",
                "of them processor",
                "bytes",
            ],
            steps,
        ),
        "",
        "## What is left: the start, and signs of life",
        "",
        f"Start: all connect, and meet {MEETINGS_OF_A_START} times. Signs of life: one byte a "
        "second from and to each rank; share of one core, in the process of rank 0.",
        "",
        *table(
            [
                "ranks",
                "start: s",
                "of them processor",
                "bytes",
                "signs of life before: % of a core",
                "after",
                "bytes a second",
            ],
            rest,
        ),
    ]
    if options.no_record:
        print("\n".join(body))
        return
    path = write_record(
        "control_plane", "What the control connection costs", "make bench-control_plane", body
    )
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
