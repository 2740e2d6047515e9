"""The environment variables a rank should start with; they count only before Paddle is imported.

What the user has set already is never changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from paddle_recompute._paddle.cpu_settings import settings_for

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def speed_settings(
    ranks_on_machine: int, environment: Mapping[str, str], *, device: str | None = None
) -> dict[str, str]:
    """What makes a rank fast on this machine's CPU, less what `environment` holds already.

    Args:
        ranks_on_machine: How many ranks share the cores.
        environment: The variables in force.
        device: Where the rank computes: ``"cpu"``, ``"gpu"``; None: not known.

    Returns:
        ``OMP_NUM_THREADS``, the rank's share of the cores, because Paddle uses one thread where
        it is not set; and what `use_cpu_settings` sets.
    """
    settings = {"OMP_NUM_THREADS": str(max(1, available_cores() // ranks_on_machine))}
    chosen = {name: value for name, value in settings.items() if name not in environment}
    return chosen | settings_for(environment, device)


def quiet_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep Paddle's own messages out of a rank's output, if they are not set yet."""
    settings = {
        "GLOG_minloglevel": "2",  # errors only: no "Successfully connected to 127.0.0.1"
        "PYTHONWARNINGS": "ignore:No ccache found",
    }
    return {name: value for name, value in settings.items() if name not in environment}


def available_cores() -> int:
    """The cores that this process may use: its affinity mask, and a container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text(encoding="ascii").split()
    except (OSError, ValueError):  # no cgroup v2 here
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
