"""What a test can set and read of the simulated device while it runs.

Names are those of ``plugin/numbers.h``: ``copy_us``, ``kernel_us``, ``collective_us`` and
``memory_mb`` are settings; ``bytes``, ``peak_bytes``, ``copies_to_host`` and others are counters.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from tests.fake_device.build import LIBRARY


@functools.cache
def _library() -> ctypes.CDLL:
    # The one that Paddle has loaded: the same file is not loaded twice.
    return ctypes.CDLL(str(Path(os.environ["CUSTOM_DEVICE_ROOT"]) / LIBRARY))


def _number(name: str, value: int | None) -> int:
    function = _library().fake_device_number
    function.argtypes = [ctypes.c_char_p, ctypes.c_bool, ctypes.c_long]
    function.restype = ctypes.c_long
    before = int(function(name.encode(), value is not None, value or 0))
    if before < 0:
        raise KeyError(f"the simulated device has no number {name!r}")
    return before


def read(name: str) -> int:
    """A counter or a setting."""
    return _number(name, None)


@contextlib.contextmanager
def set_to(**settings: int) -> Iterator[None]:
    """Inside, the given settings hold; afterwards those before."""
    before = {name: _number(name, value) for name, value in settings.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            _number(name, value)


def environment() -> dict[str, str]:
    """For a child process that does not begin with ``tests.ranks``."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
