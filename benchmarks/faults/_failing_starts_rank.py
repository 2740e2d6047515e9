"""One rank of a start in which one fails: the ranks' side of `failing_starts`."""

from __future__ import annotations

import builtins
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

PLACES = (
    "before it connects", "the configuration", "the comparison of settings", "the store", "gloo",
    "after the group", "the data", "the model", "the first step",
)  # fmt: skip
KINDS = ("typo", "missing file", "ValueError", "SIGKILL", "os._exit", "sys.exit")
CODES = {"typo": 2, "missing file": 2, "ValueError": 1, "SIGKILL": -9, "os._exit": 7, "sys.exit": 5}


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    Attributes:
        rank: The victim.
        kind: One of `KINDS`.
        place: One of `PLACES`; "" where an override is the failure.
    """

    rank: int
    kind: str
    place: str = ""

    def strike(self) -> None:
        strike(self.kind, self.place)


def strike(kind: str, place: str) -> None:
    """Let this process fail, in the way `kind`."""
    print(f"struck in {place}", flush=True)
    if kind in ("SIGKILL", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, kind))
    elif kind == "hang":
        time.sleep(3600)
    elif kind == "os._exit":
        os._exit(CODES[kind])
    elif kind == "sys.exit":
        sys.exit(CODES[kind])
    else:
        raise getattr(builtins, kind)(f"planted in {place}")


def run(arguments: list[str], fault: Fault | None) -> None:
    """One rank; `fault` is None on those that do not fail by themselves."""
    if fault is not None and fault.place:
        plant(fault)
    from paddle_recompute.app.cli import main

    main(arguments)


def plant(fault: Fault) -> None:
    """Put the failure into the function at its place."""
    if fault.place == PLACES[0]:
        fault.strike()
    from paddle.base import core

    from paddle_recompute.app.cli import _on_ranks
    from paddle_recompute.app.trainer import budget_plan, setup, trainer

    class Gloo:
        @staticmethod
        def create(*arguments: Any) -> Any:
            fault.strike()

    def struck(*arguments: Any, **named: Any) -> Any:
        fault.strike()

    owner, name = {
        "the configuration": (_on_ranks, "load_config"),
        "the comparison of settings": (setup, "check_same_settings"),
        "the store": (core, "TCPStore"),
        "gloo": (core, "ProcessGroupGloo"),
        "after the group": (trainer, "run_folder"),
        "the data": (trainer, "prepare_data"),
        "the model": (trainer, "seeded_model"),
        "the first step": (budget_plan.PlannedSteps, "__call__"),
    }[fault.place]
    setattr(owner, name, Gloo if fault.place == "gloo" else struck)
