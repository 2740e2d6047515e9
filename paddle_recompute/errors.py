"""The exceptions that a user of the library can meet.

Every one derives from `PaddleRecomputeError`; the command line prints it as one paragraph and
exits with code 2. Each also derives from the built-in exception that a reader would expect, so
`except ValueError` around a bad argument keeps working.
"""

from __future__ import annotations


class PaddleRecomputeError(Exception):
    """Base of all errors raised on purpose by this library."""


class ConfigError(PaddleRecomputeError, ValueError):
    """A configuration that cannot be honoured; lists every fault at once."""


class DataError(PaddleRecomputeError, ValueError):
    """Input data that cannot be used; starts with ``file:line:`` where a line is to blame."""


class CheckpointError(PaddleRecomputeError, ValueError):
    """A weights or checkpoint file that is missing, damaged or for another model."""


class DependencyError(PaddleRecomputeError, ImportError):
    """A package that is missing or too old; the message says what to install."""


class LaunchError(PaddleRecomputeError, RuntimeError):
    """The ranks could not be started, or one of them failed."""


class SelectionError(PaddleRecomputeError, ValueError):
    """A sublayer pattern or policy that selects nothing, or cannot be applied."""


class RecomputeError(PaddleRecomputeError, RuntimeError):
    """The second forward of a recomputed function is not a repetition of the first."""


class SyncError(PaddleRecomputeError, RuntimeError):
    """The ranks disagree about what is to be synchronized, or one of them is gone."""


class PeerError(SyncError):
    """A rank died, stopped or came too late; the message names it and the step."""


class DivergenceError(PaddleRecomputeError, ArithmeticError):
    """The loss or the gradient is no finite number any more."""


class StaticGraphError(PaddleRecomputeError, RuntimeError):
    """A Program that cannot be trained as asked: its checkpoints, its operators or its Paddle."""
