"""Exact bytes held by Paddle's allocator, on whichever device is in use.

On CPU the figures are exact and repeat to the byte; on a device they are the allocator's own,
without what the driver and libraries take. ``device_memory_stat_*`` (2.6, 3.x) is what
``paddle.device.memory_allocated`` (from 3.2 on, not on 2.6) and ``paddle.device.cuda.*`` (GPUs
alone; 2.6 cannot reset a peak) read, and ``host_memory_stat_*`` (2.6, 3.x) are the only counters
for the CPU. Can go when the first is in every supported version and counts the CPU too.
"""

from __future__ import annotations

from typing import Any

import paddle
from paddle.base import core

from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.errors import DependencyError


def current_bytes() -> int:
    """Bytes allocated now.

    Raises:
        DependencyError: This Paddle does not count them on this device.
    """
    return int(_statistic("current"))


def peak_bytes() -> int:
    """The largest `current_bytes` since the start or the last `reset_peak`.

    Raises:
        DependencyError: This Paddle does not count them on this device.
    """
    return int(_statistic("peak"))


def can_reset_peak() -> bool:
    """Whether `reset_peak` works here: from Paddle 3.0 on.

    Where it does not, a peak can still be measured as the first thing of a process, or by taking
    the smaller of two peaks first.
    """
    return is_counted() and hasattr(core, "host_memory_stat_reset_peak_value")


def reset_peak() -> None:
    """Forget the peak so far; only where `can_reset_peak`."""
    _statistic("reset_peak")


def is_counted() -> bool:
    """Whether there are figures for the device in use.

    On 2.6 the counters of devices other than the CPU and GPUs stay at 0.
    """
    device = str(paddle.get_device())
    return device.startswith(("cpu", "gpu")) or paddle_version() >= (3, 0, 0)


def format_bytes(count: float) -> str:
    """`count` in the unit that reads best: ``"812 B"``, ``"1.5 KiB"``, ``"23.4 MiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _statistic(kind: str) -> Any:
    device, _, number = str(paddle.get_device()).partition(":")
    if not is_counted():
        raise DependencyError(
            f"Paddle {paddle.__version__} does not count the memory of '{paddle.get_device()}'; "
            "Paddle 3 does"
        )
    where = "host" if device == "cpu" else "device"
    return getattr(core, f"{where}_memory_stat_{kind}_value")("Allocated", int(number or 0))
