"""What every benchmark needs: a process of its own, the machine, tables and dated records."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


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

    commit = _git("rev-parse", "--short", "HEAD")
    # Records are no code: one may be written after the other.
    dirty = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
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


@contextlib.contextmanager
def picture(topic: str, size: tuple[float, float] = (8, 5)) -> Iterator[tuple[Any, str]]:
    """Axes to draw on, and the name of the file; it is written at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size)
    path = RESULTS / f"{topic}_{hardware_tag()}.png"
    yield axes, path.name
    axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_record(topic: str, title: str, command: str, body: Sequence[str]) -> Path:
    """Write and print ``results/<topic>_<hardware>_paddle<version>_<YYYYMM>.md``; its path."""
    about = environment()
    version = about["paddle"].replace(".", "")
    month = date.today().strftime("%Y%m")
    path = RESULTS / f"{topic}_{hardware_tag()}_paddle{version}_{month}.md"
    lines = [f"# {title}", "", f"Command: `{command}`", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join([*lines, "", *body, ""]), encoding="utf-8")
    print(path, *lines, "", *body, sep="\n", flush=True)
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; numbers are the caller's to format."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    return run.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
