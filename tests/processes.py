"""A Python process of its own for a test, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.ranks import ROOT, free_ports, rank_environment


def python(
    *arguments: str | Path,
    folder: Path = ROOT,
    env: Mapping[str, str] | None = None,
    timeout: float = 110.0,
    fails: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments`` in `folder`; without `fails`, it must end with 0.

    Args:
        *arguments: As on the command line.
        folder: The current folder of the process.
        env: Its variables; those of this process if left out.
        timeout: Seconds.
        fails: Whether the caller looks at the exit code.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**(os.environ if env is None else env), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
    )
    assert fails or done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done


def python_on_ranks(*arguments: str | Path, num_ranks: int = 2, folder: Path = ROOT) -> list[str]:
    """Run ``python *arguments`` once for each rank; what each says. All must end with 0."""
    ports = free_ports(num_ranks + 1)
    ranks = [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=rank_environment(rank, ports),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=110)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return outputs


def outside_of_ranks() -> dict[str, str]:
    """The variables without what makes a process a rank, should the tests run under a launcher."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
