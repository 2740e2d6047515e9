"""Colours for people; a log has plain lines."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

import click

from paddle_recompute.app.launch._rank_process import ON_TERMINAL


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
