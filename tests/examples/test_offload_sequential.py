"""The example learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.ranks import ROOT


def test_it_learns() -> None:
    done = subprocess.run(
        [sys.executable, "examples/offload_sequential.py", "--steps", "6"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(one) for one in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0]
