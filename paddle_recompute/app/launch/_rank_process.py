"""What a process knows of the launcher: whether it was started by it, and what shows its output."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, TextIO

import click

ON_TERMINAL = "PADDLE_RECOMPUTE_ON_TERMINAL"
STARTED = "PADDLE_RECOMPUTE_STARTED"
"""When the launcher was called (``time.time``)."""
_PR_SET_PDEATHSIG = 1


def is_launched() -> bool:
    """Whether `launch` started this process."""
    return STARTED in os.environ


def die_with_parent(signal_number: int) -> None:
    """Ask Linux to send this process `signal_number` when the one that started it is gone.

    Nothing else tells of a parent that was killed with SIGKILL; its ranks would train on.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number))


def is_on_terminal(stream: TextIO) -> bool:
    """Whether a person sees `stream` on a terminal.

    A rank that `launch` started writes to a file, which the launcher shows.
    """
    return stream.isatty() or ON_TERMINAL in os.environ


def styled(text: str, *, stream: TextIO | None = None, **style: Any) -> str:
    """`text` as `click.style` has it where a person sees it on a terminal; else as it is.

    ``NO_COLOR`` (see no-color.org) switches colours off.

    Args:
        text: One line or more.
        stream: Where it will be written; None: standard output.
        **style: As `click.style` takes it.
    """
    is_seen = is_on_terminal(stream or sys.stdout) and not os.environ.get("NO_COLOR")
    return click.style(text, **style) if is_seen else text
