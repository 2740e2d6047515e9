"""A rank for tests/app/launch/test_launch.py; it needs no Paddle, so it starts at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from paddle_recompute.app.launch._rank_process import LOG_DIR, prepare_rank
from paddle_recompute.errors import DataError

RANK = int(os.environ["PADDLE_TRAINER_ID"])


def settings() -> None:
    """Tell what the rank was given."""
    names = ("PADDLE_TRAINERS_NUM", "OMP_NUM_THREADS", "PADDLE_DISTRI_BACKEND", "MASTER_ADDR")
    print(f"rank {RANK}", *(f"{name}={os.environ.get(name)}" for name in names))


def refuse() -> None:
    """Rank 1 ends with an error for the user; rank 0 fails when that has been written."""
    if RANK == 1:
        raise DataError("pairs.tsv:7: one column where two are needed")
    error = Path(os.environ[LOG_DIR]) / "error.1.json"
    while not error.exists():
        time.sleep(0.02)
    raise RuntimeError("peer is gone")


def fail() -> None:
    """Rank 1 ends with a bug; rank 0 waits to be stopped."""
    if RANK == 1:
        raise ZeroDivisionError("rank one divides by zero")
    time.sleep(60)


def killed() -> None:
    """Rank 1 is gone without a word."""
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def remove() -> None:
    """Rank 1 ends without its log."""
    if RANK == 1:
        (Path(os.environ[LOG_DIR]) / "workerlog.1").unlink()
        os._exit(3)
    time.sleep(60)


def wait(folder: str) -> None:
    """Write the process id, then wait, on a terminal with a bar."""
    Path(folder, f"{RANK}.pid").write_text(str(os.getpid()))
    print(f"terminal {sys.stderr.isatty()} {os.environ.get('COLUMNS')}")
    sys.stderr.write("\rstep 1/9\rstep 2/9")
    time.sleep(60)


if __name__ == "__main__":
    prepare_rank()
    {f.__name__: f for f in (settings, refuse, fail, killed, remove, wait)}[sys.argv[1]](
        *sys.argv[2:]
    )
