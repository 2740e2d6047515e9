"""The exceptions of this library.

All derive from `PaddleRecomputeError`. The command line prints such an error as one paragraph and
exits with code 2. Each also derives from a built-in exception, so `except ValueError` around a bad
argument works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable


class PaddleRecomputeError(Exception):
    """Base of all errors raised on purpose by this library."""


class ConfigError(PaddleRecomputeError, ValueError):
    """The configuration is wrong or cannot be honoured; the message lists all faults."""


class DataError(PaddleRecomputeError, ValueError):
    """Input data cannot be used; the message starts with ``file:line:`` if a line is wrong."""


class CheckpointError(PaddleRecomputeError, ValueError):
    """A weights or checkpoint file is missing, damaged or of another model."""


class DependencyError(PaddleRecomputeError, ImportError):
    """A package is missing or too old; the message says what to install."""


class LaunchError(PaddleRecomputeError, RuntimeError):
    """The ranks could not be started, or one of them failed."""


class SelectionError(PaddleRecomputeError, ValueError):
    """A sublayer pattern or policy selects nothing, or cannot be applied."""


class RecomputeError(PaddleRecomputeError, RuntimeError):
    """A recomputed function cannot be repeated, or its second forward differs from the first."""


class PlanError(PaddleRecomputeError, ValueError):
    """No plan keeps within the memory budget, or the step cannot be measured or planned."""


class OutOfMemoryError(PaddleRecomputeError, MemoryError):
    """A step of several ranks ran out of memory; the next start goes on with a smaller plan."""


class SyncError(PaddleRecomputeError, RuntimeError):
    """The ranks differ in what they synchronize, or synchronization failed."""


class PeerError(SyncError):
    """A rank died, stopped or is too late; the message names the rank and the step."""


class DivergenceError(PaddleRecomputeError, ArithmeticError):
    """The loss or the gradient is not finite.

    Attributes:
        steps_ago: 0: in the step that was just made or whose result was read; 1: in the step
            before.
    """

    steps_ago = 0


class OutputError(PaddleRecomputeError, OSError):
    """A file of the run's output folder cannot be written: the disk is full, or the folder gone."""


class StoppedError(PaddleRecomputeError, SystemExit):
    """The run was asked to stop by a signal, and has saved its state.

    Uncaught, it ends the process without a traceback, with the exit code of that signal.

    Attributes:
        code: 128 + the number of the signal: 143 for SIGTERM, 130 for SIGINT.
    """

    code: int

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class StaticGraphError(PaddleRecomputeError, RuntimeError):
    """A Program cannot be trained as asked: its checkpoints, operators or Paddle version."""


class OffloadError(PaddleRecomputeError, OSError):
    """What is kept off the device cannot be stored there, or cannot be used where it is."""


def listed(names: Iterable[str]) -> str:
    """The first five of `names`, for a message, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def first_sentence(error: BaseException) -> str:
    """An error in one line: its class, and the first line of it that tells something, without
    Paddle's listing of transformed code and the headings of its C++.
    """
    name = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith(("In transformed code", "In user code")):
        own = [line for line in lines if line.partition(":")[0].rpartition(".")[2] == name]
        kinds = [line for line in lines if re.match(r"\w+Error: ", line)]  # of Paddle's C++
        lines = own or kinds[-1:] or lines[-1:]
    # Paddle's C++ begins its own sentence with the kind of the error.
    telling = [line for line in lines if line.startswith("(")] or [
        line for line in lines if not line.startswith(("[Hint", "---", "C++ ", "Error Mess"))
    ]
    sentence = (telling or lines or ["?"])[0][:300]
    return f"{name}: {re.sub(rf'^[a-zA-Z_.]*{name}: ', '', sentence)}"
