"""The environment variables a rank should start with; they count only before Paddle is imported.

What the user has set already is never changed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
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
        it is not set; and on x86 Linux with an AMD CPU ``MKL_DEBUG_CPU_TYPE=5``, because the MKL
        in Paddle's wheels (2.6, 3.x) takes a path half as fast there without it. On a CPU also
        ``FLAGS_use_stride_kernel=0``: slices, transpositions and reshapes make contiguous copies
        and not strided views, which Paddle's CPU kernels (2.6, 3.x) go through element by element.
        So what is written into a slice does not reach the tensor that it was cut from, and
        ``paddle.as_strided`` does not work; the library's own models do neither.
    """
    settings = {"OMP_NUM_THREADS": str(max(1, available_cores() // ranks_on_machine))}
    if is_amd_on_linux():
        settings["MKL_DEBUG_CPU_TYPE"] = "5"
    if device == "cpu":
        settings["FLAGS_use_stride_kernel"] = "0"
    return {name: value for name, value in settings.items() if name not in environment}


def quiet_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """What keeps Paddle's own remarks out of a rank's output, less what is set already."""
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


def is_amd_on_linux() -> bool:
    """Whether the CPU is an x86 one by AMD, and the system Linux."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    try:
        return "AuthenticAMD" in CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
