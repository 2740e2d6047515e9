"""What every benchmark needs: paired timing, a peak in a process of its own, and a dated record."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def paired_seconds(
    variants: dict[str, Callable[[], object]],
    *,
    warm_up: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of every variant in every round; a round runs each variant once, in turn.

    Whatever slows the machine down slows neighbours in a round alike, so ratios within a round
    mean something where absolute times do not.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(warm_up + rounds):
        for name, step in variants.items():
            start = clock()
            step()
            if number >= warm_up:
                seconds[name].append(clock() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], to: str) -> dict[str, tuple[float, float, float]]:
    """Median, first and third quartile over the rounds of each variant's time against `to`'s."""
    result = {}
    for name, values in seconds.items():
        shares = sorted(a / b for a, b in zip(values, seconds[to], strict=True))
        low, middle, high = statistics.quantiles(shares, n=4, method="inclusive")
        result[name] = (middle, low, high)
    return result


def in_own_process(
    module: str,
    *arguments: str,
    python: str = sys.executable,
    timeout: float | None = None,
    **environment: str,
) -> Any:
    """The JSON that ``python -m module arguments...`` prints as its last line.

    `timeout` is in seconds; `environment` is beside that of this process.
    """
    run = subprocess.run(
        [python, "-m", module, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path_with_root(), **environment},
    )
    if run.returncode != 0:
        raise SystemExit(f"{module} {' '.join(arguments)} failed:\n{run.stderr[-3000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def torch_python() -> str:
    """The interpreter with torch: ``TORCH_PYTHON``, or that of ``make venv-torch``."""
    return os.environ.get("TORCH_PYTHON", str(ROOT / ".venv-torch" / "bin" / "python"))


def path_with_root() -> str:
    """``PYTHONPATH`` of a child that imports this checkout."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def environment() -> dict[str, str]:
    """What a reader must know to run it again: commit, versions, CPU, threads."""
    import numpy
    import paddle

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    dirty = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "date": date.today().isoformat(),
        "commit": commit + (" and uncommitted changes" if dirty else ""),
        "paddle": paddle.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "unset"),
        "MKL_DEBUG_CPU_TYPE": os.environ.get("MKL_DEBUG_CPU_TYPE", "unset"),
    }


def hardware_tag() -> str:
    """For file names: ``2core-amd-epyc``."""
    words = _cpu_name().lower().replace("(r)", "").split()[:2]
    return f"{os.cpu_count()}core-{'-'.join(words)}"


def write_record(topic: str, title: str, command: str, body: Sequence[str]) -> Path:
    """Write ``results/<topic>_<hardware>_paddle<version>_<YYYYMM>.md``; returns its path."""
    about = environment()
    version = about["paddle"].replace(".", "")
    month = date.today().strftime("%Y%m")
    path = RESULTS / f"{topic}_{hardware_tag()}_paddle{version}_{month}.md"
    lines = [f"# {title}", "", f"Command: `{command}`", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([*lines, "", *body, ""]), encoding="utf-8")
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; numbers are the caller's to format."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
