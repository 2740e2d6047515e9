"""A rank for tests/app/launch/test_launch.py; it needs no Paddle, so it starts at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from paddle_recompute.app.launch import errors_in_one_paragraph, is_on_terminal
from paddle_recompute.errors import DataError, PeerError

RANK = int(os.environ["PADDLE_TRAINER_ID"])


def settings() -> None:
    """Tell what the rank was given."""
    names = ("PADDLE_TRAINERS_NUM", "OMP_NUM_THREADS", "PADDLE_DISTRI_BACKEND", "MASTER_ADDR")
    print(f"rank {RANK}", *(f"{name}={os.environ.get(name)}" for name in names))


def refuse() -> None:
    """Rank 1 ends with an error of the library, after rank 0, which ends because of it."""
    with errors_in_one_paragraph(False, "interrupted"):
        if RANK == 1:
            time.sleep(0.3)
            raise DataError("pairs.tsv:7: one column where two are needed")
        raise PeerError("rank 1 failed")


def peers() -> None:
    """Each rank ends because of another one."""
    with errors_in_one_paragraph(False, "interrupted"):
        raise PeerError("rank 9 has died")


def deaf(folder: str) -> None:
    """Rank 1 ends because of another one, and rank 0 by nothing but SIGKILL."""
    ready = Path(folder, "ready")
    if RANK == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready.touch()
        time.sleep(60)
    while not ready.exists():
        time.sleep(0.01)
    peers()


def fail() -> None:
    """Rank 1 ends with a bug; rank 0 waits to be stopped."""
    if RANK == 1:
        raise ZeroDivisionError("rank one divides by zero")
    time.sleep(60)


def killed() -> None:
    """Rank 1 is gone silently."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def wait(folder: str) -> None:
    """Write the process id, then wait, on a terminal with a bar."""
    Path(folder, f"{RANK}.pid").write_text(str(os.getpid()))
    print(f"terminal {is_on_terminal(sys.stderr)} {os.environ.get('COLUMNS')}")
    sys.stderr.write("\rstep 1/9\rstep 2/9")
    time.sleep(60)


if __name__ == "__main__":
    workers = (settings, refuse, peers, deaf, fail, killed, wait)
    {f.__name__: f for f in workers}[sys.argv[1]](*sys.argv[2:])
