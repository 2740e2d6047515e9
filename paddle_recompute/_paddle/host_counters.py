"""The CPU allocator's counters."""

from __future__ import annotations

from paddle.base import core


def host_memory(kind: str) -> int:
    """Bytes that Paddle's CPU allocator holds: `kind` is ``"current"`` or ``"peak"``.

    ``host_memory_stat_*`` (2.6, 3.x) are the only counters for the CPU; the public
    ``paddle.device.cuda.max_memory_allocated`` is for GPUs alone.
    """
    read = getattr(core, f"host_memory_stat_{kind}_value")
    return int(read("Allocated", 0))


def can_reset_host_memory_peak() -> bool:
    """Whether the CPU's peak can start anew: from 3.0 on, not on 2.6."""
    return hasattr(core, "host_memory_stat_reset_peak_value")


def reset_host_memory_peak() -> None:
    """Start a new peak at the bytes held now (``host_memory_stat_reset_peak_value``; 3.x)."""
    core.host_memory_stat_reset_peak_value("Allocated", 0)
