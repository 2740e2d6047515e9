"""The resident memory of this process, for sides that have no allocator in common. Linux only."""

from __future__ import annotations

import re
from pathlib import Path


def resident(name: str) -> int:
    """Bytes: ``VmRSS`` now, ``VmHWM`` at most so far.

    `ru_maxrss` would hold the peak of the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) * 1024
