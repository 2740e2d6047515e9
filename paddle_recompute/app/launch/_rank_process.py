"""What a rank that `launch` started does for it: leave its error in a file; colours for people.

Python's own way of telling an error, a traceback on standard error, would reach the launcher as
text in a log. So the rank writes the error to ``error.<rank>.json`` in the log folder, and the
launcher, which sees those of all ranks, tells the user about the one that came first.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import click

from paddle_recompute.errors import PaddleRecomputeError, StoppedError

LOG_DIR = "PADDLE_RECOMPUTE_LOG_DIR"
ON_TERMINAL = "PADDLE_RECOMPUTE_ON_TERMINAL"
STARTED = "PADDLE_RECOMPUTE_STARTED"
"""When the launcher was called (``time.time``)."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankError:
    """An exception that ended a rank.

    Attributes:
        rank: Number of the rank.
        time: Seconds of the clock that all processes of a machine share and that never jumps.
        message: What the exception says, with its type unless it is one of the library's own.
        is_users: Whether it is one of the library's own, meant for the user's eyes.
        traceback: As Python prints it.
        kind: The name of its class.
        exit_code: What the rank ended with, where it was asked to stop by a signal and has saved
            its state.
    """

    rank: int
    time: float
    message: str
    is_users: bool
    traceback: str
    kind: str = ""
    exit_code: int | None = None


def is_launched() -> bool:
    """Whether `launch` started this process."""
    return LOG_DIR in os.environ


def prepare_rank() -> None:
    """To be called first in a process that `launch` started."""
    sys.excepthook = leave_error
    if ON_TERMINAL in os.environ:
        sys.stderr = _TerminalStream(sys.stderr)


def read_errors(log_dir: Path) -> list[RankError]:
    """The errors that ranks left in `log_dir`, in the order in which they happened; those that only
    tell of another rank's come last.
    """
    errors = [
        RankError(**json.loads(path.read_text(encoding="utf-8")))
        for path in log_dir.glob("error.*.json")
    ]
    return sorted(errors, key=lambda error: (error.kind == "PeerError", error.time))


def die_with_parent(signal_number: int) -> None:
    """Ask Linux to send this process `signal_number` when the one that started it is gone.

    Nothing else tells of a parent that was killed with SIGKILL; its ranks would train on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number))


def leave_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Write what ends this rank into the log folder, for the launcher; ``sys.excepthook`` of ranks.

    Where the disk is full it goes to standard error.
    """
    is_users = isinstance(error, PaddleRecomputeError)
    left = RankError(
        rank=int(os.environ["PADDLE_TRAINER_ID"]),
        time=time.monotonic(),
        message=str(error) if is_users else f"{kind.__name__}: {error}",
        is_users=is_users,
        traceback=""
        if isinstance(error, StoppedError)
        else "".join(traceback.format_exception(kind, error, trace)),
        kind=kind.__name__,
        exit_code=error.code if isinstance(error, StoppedError) else None,
    )
    path = Path(os.environ[LOG_DIR]) / f"error.{left.rank}.json"
    unfinished = path.with_suffix(".unfinished")
    try:
        unfinished.write_text(json.dumps(asdict(left)), encoding="utf-8")
        unfinished.rename(path)
    except OSError as fault:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{left.traceback}({path} cannot be written: {fault.strerror})\n")


class _TerminalStream:
    """A stream into a log file whose other end, by way of the launcher, is a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        return True


def styled(text: str, *, stream: TextIO | None = None, **style: Any) -> str:
    """`text` as `click.style` has it where a person sees it on a terminal; else as it is.

    A rank that the launcher started writes to a file, which the launcher shows. ``NO_COLOR`` (see
    no-color.org) switches colours off.

    Args:
        text: One line or more.
        stream: Where it will be written; None: standard output.
        **style: As `click.style` takes it.
    """
    is_seen = (stream or sys.stdout).isatty() or ON_TERMINAL in os.environ
    return click.style(text, **style) if is_seen and not os.environ.get("NO_COLOR") else text
