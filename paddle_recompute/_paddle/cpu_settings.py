"""Two settings of Paddle's process with which a step takes about half of the time on a CPU.

Paddle's wheels (2.6, 3.x) have both at their slow value. The launcher sets them in the environment
of its ranks, and `use_cpu_settings` in a process that runs. What the user has set stays.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
MAPPED_FILES = Path("/proc/self/maps")

SWITCH = "PADDLE_RECOMPUTE_CPU_SETTINGS"
"""A variable of the environment; with the value 0 nothing is set here, and nothing is said."""
MKL = "MKL_DEBUG_CPU_TYPE"
STRIDES = "FLAGS_use_stride_kernel"
WORTH = {MKL: "matrix products take a half to a third of the time", STRIDES: "a step 0.6 to 0.9"}

_AVX512 = {"avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"}
_PAGE = "docs/limits.md, 'Time on a CPU'"
_logger = logging.getLogger("paddle_recompute")
_said: set[str] = set()


@dataclass(frozen=True)
class CpuSettings:
    """What `use_cpu_settings` did, by the names of variables of the environment.

    Attributes:
        set: The settings that are in force from now on, and were not.
        late: Those that are without effect, because Paddle has made its first matrix product.
    """

    set: dict[str, str]
    late: dict[str, str]

    def __str__(self) -> str:
        parts = [f"set {_listed(self.set)}"] if self.set else []
        if self.late:
            parts.append(
                f"too late for {_listed(self.late)}, which is read at the first matrix product; "
                "set it before that"
            )
        return "; ".join(parts) or "nothing to set"


def use_cpu_settings() -> CpuSettings:
    """Set what makes Paddle fast on this machine's CPU, in a process that runs; see `CpuSettings`.

    Call it before the first matrix product. It sets, unless the environment has a value:

    - ``MKL_DEBUG_CPU_TYPE``, on x86-64 Linux with an AMD CPU: 7 with AVX-512, else 5. MKL takes
      its slowest path there without it. Matrix products sum in another order then.
    - ``FLAGS_use_stride_kernel`` to False, by ``paddle.set_flags``. Slices, transpositions and
      reshapes make copies then and no strided views: a write into a slice does not reach the
      tensor that it was cut from, and ``paddle.as_strided`` does not work.

    Where Paddle computes on another device, or ``PADDLE_RECOMPUTE_CPU_SETTINGS`` is 0, it sets
    nothing. `Trainer`, `load_encoder` and `encode_texts` call it.

    Examples:
        >>> from paddle_recompute import use_cpu_settings
        >>> done = use_cpu_settings()
        >>> print(use_cpu_settings())  # doctest: +SKIP
        nothing to set
    """
    import paddle

    missing = missing_cpu_settings()
    if STRIDES in missing.set:
        paddle.set_flags({STRIDES: False})
    os.environ.update({name: value for name, value in missing.set.items() if name != STRIDES})
    return missing


def missing_cpu_settings() -> CpuSettings:
    """What `use_cpu_settings` would do now."""
    import paddle

    if paddle.get_device() != "cpu":
        return CpuSettings({}, {})
    wanted = settings_for(os.environ, "cpu")
    if not paddle.get_flags(STRIDES)[STRIDES]:
        wanted.pop(STRIDES, None)
    late = {MKL: wanted.pop(MKL)} if MKL in wanted and _has_multiplied() else {}
    return CpuSettings(wanted, late)


def use_cpu_settings_and_say_so() -> None:
    """As `use_cpu_settings`; what was set, or came too late, is logged once in a process."""
    done = use_cpu_settings()
    if _is_new({**done.set, **done.late}):
        _logger.warning("CPU settings: %s; %s=0 switches this off (%s)", done, SWITCH, _PAGE)


def log_missing_cpu_settings() -> None:
    """Log once which settings would make this process faster; nothing is changed."""
    missing = missing_cpu_settings()
    found = {**missing.set, **missing.late}
    if _is_new(found):
        _logger.warning("%s", advice(found))


def advice(missing: Mapping[str, str]) -> str:
    """In words, what `missing` is worth and how to set it."""
    worth = "; ".join(f"{name}={value} ({WORTH[name]})" for name, value in missing.items())
    return (
        f"this CPU is faster with {worth}: call paddle_recompute.use_cpu_settings() before the "
        f"first matrix product; {SWITCH}=0 silences this ({_PAGE})"
    )


def settings_for(environment: Mapping[str, str], device: str | None) -> dict[str, str]:
    """The variables for a process that computes on `device`, less what `environment` has.

    Args:
        environment: The variables in force.
        device: ``"cpu"``, ``"gpu"``; None: not known.
    """
    if environment.get(SWITCH) == "0":
        return {}
    settings = {}
    if is_amd_on_linux():
        # Without AVX-512 path 7 is an illegal instruction, as 8 is everywhere.
        settings[MKL] = "7" if _flags() >= _AVX512 else "5"
    if device == "cpu":
        settings[STRIDES] = "0"
    return {name: value for name, value in settings.items() if name not in environment}


def is_amd_on_linux() -> bool:
    """Whether the CPU is an x86 one by AMD, and the system Linux."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    return "AuthenticAMD" in _text_of(CPU_INFO)


def _flags() -> set[str]:
    lines = (line.partition(":") for line in _text_of(CPU_INFO).splitlines())
    return next((set(value.split()) for name, _, value in lines if name.strip() == "flags"), set())


def _has_multiplied() -> bool:
    """Whether MKL is in this process: Paddle (2.6, 3.x) loads it at the first matrix product."""
    return "libmklml" in _text_of(MAPPED_FILES)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _is_new(found: Mapping[str, str]) -> bool:
    is_new = bool(found.keys() - _said)
    _said.update(found)
    return is_new


def _listed(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())
