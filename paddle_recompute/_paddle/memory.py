"""Exact bytes held by Paddle's allocator, on whichever device is in use.

On CPU the figures are exact and repeat to the byte; on a GPU they are the allocator's own
(``paddle.device.cuda.*``), without what the driver and libraries take.
"""

from __future__ import annotations

import paddle

from paddle_recompute import _paddle


def current_bytes() -> int:
    """Bytes allocated now."""
    if _on_gpu():
        return int(paddle.device.cuda.memory_allocated())
    return _paddle.host_memory("current")


def peak_bytes() -> int:
    """The largest `current_bytes` since the start or the last `reset_peak`."""
    if _on_gpu():
        return int(paddle.device.cuda.max_memory_allocated())
    return _paddle.host_memory("peak")


def can_reset_peak() -> bool:
    """Whether `reset_peak` works here; on CPU it does from Paddle 3.0 on.

    Where it does not, a peak can still be measured as the first thing of a process, or by taking
    the smaller of two peaks first.
    """
    return _on_gpu() or _paddle.can_reset_host_memory_peak()


def reset_peak() -> None:
    """Forget the peak so far; only where `can_reset_peak`."""
    if _on_gpu():
        paddle.device.cuda.reset_max_memory_allocated()
    else:
        _paddle.reset_host_memory_peak()


def format_bytes(count: float) -> str:
    """`count` in the unit that reads best: ``"812 B"``, ``"1.5 KiB"``, ``"23.4 MiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _on_gpu() -> bool:
    return str(paddle.get_device()).startswith("gpu")
