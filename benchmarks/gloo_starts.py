"""How often ranks connect: gloo's first attempt fails on three ranks or more, again and again.

Each start is one of new processes. "As Paddle does it" is ``paddle.distributed.init_parallel_env``,
once; "tried again" is what `train` calls, which makes the group anew where gloo has failed.

    python -m benchmarks.gloo_starts --starts 20            # about ten minutes
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from benchmarks._record import table, write_record

PATIENCE = 90.0
_START = """
import sys
import paddle
import paddle.distributed as dist
from paddle_recompute import _paddle
(dist if sys.argv[1] == "plain" else _paddle).init_parallel_env()
number = paddle.ones([1])
dist.all_reduce(number)
assert number.item() == dist.get_world_size()
print("connected", flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True)
class Start:
    """One start: whether all ranks connected, after how many seconds, and how often anew."""

    connected: bool
    seconds: float
    attempts: int


def start(way: str, num_ranks: int) -> Start:
    """Start `num_ranks` processes, and end them."""
    ports = _free_ports(num_ranks + 1)
    began = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-u", "-c", _START, way],
            env=_environment(rank, ports),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(num_ranks)
    ]
    deadline = began + PATIENCE
    for process in processes:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
    said = [b""] * num_ranks
    while time.monotonic() < deadline and not all(b"connected" in text for text in said):
        for rank, process in enumerate(processes):
            assert process.stdout is not None
            said[rank] += process.stdout.read() or b""
        if any(process.poll() is not None for process in processes):
            break
        time.sleep(0.05)
    seconds = time.monotonic() - began
    for process in processes:
        process.kill()
    errors = [process.communicate()[1] for process in processes]
    attempts = 1 + errors[0].count(b"all ranks try again")
    return Start(all(b"connected" in text for text in said), seconds, attempts)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _environment(rank: int, ports: list[int]) -> dict[str, str]:
    master, *own = ports
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(own)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{port}" for port in own),
        "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{own[rank]}",
        "PADDLE_MASTER": f"127.0.0.1:{master}",
        "PADDLE_DISTRI_BACKEND": "gloo",
    }


def main() -> None:
    """Start again and again, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ways", nargs="+", default=["plain", "again"])
    parser.add_argument("--no-record", action="store_true", help="print the table only")
    options = parser.parse_args()
    rows = []
    for way in options.ways:
        starts = []
        for _ in range(options.starts):
            starts.append(start(way, options.ranks))
            print(way, starts[-1], file=sys.stderr, flush=True)
        good = [one for one in starts if one.connected]
        longest = max((one.seconds for one in good), default=float("nan"))
        rows.append(
            [
                {"plain": "as Paddle does it", "again": "tried again"}[way],
                f"{len(good)} of {len(starts)}",
                sum(one.attempts > 1 for one in starts),
                max(one.attempts for one in starts),
                f"{sorted(one.seconds for one in starts)[len(starts) // 2]:.1f}",
                f"{longest:.1f}",
            ]
        )
    body = [
        f"{options.ranks} ranks on one machine, new processes each time, the import of Paddle "
        "included.",
        "",
        *table(
            [
                "way",
                "starts that connected",
                "of them with more attempts than one",
                "most attempts",
                "s, median",
                "s, longest",
            ],
            rows,
        ),
    ]
    if options.no_record:
        print("\n".join(body))
        return
    path = write_record("gloo_starts", "Starts of ranks on gloo", "make bench-gloo_starts", body)
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
