"""The exceptions of this library.

All derive from `PaddleRecomputeError`. The command line prints such an error as one paragraph and
exits with code 2. Each also derives from a built-in exception, so `except ValueError` around a bad
argument works.
"""

from __future__ import annotations


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


class SyncError(PaddleRecomputeError, RuntimeError):
    """The ranks differ in what they synchronize, or synchronization failed."""


class PeerError(SyncError):
    """A rank died, stopped or is too late; the message names the rank and the step."""


class DivergenceError(PaddleRecomputeError, ArithmeticError):
    """The loss or the gradient is not finite."""


class StaticGraphError(PaddleRecomputeError, RuntimeError):
    """A Program cannot be trained as asked: its checkpoints, operators or Paddle version."""


class OffloadError(PaddleRecomputeError, OSError):
    """What is kept off the device cannot be stored there, or cannot be used where it is."""
