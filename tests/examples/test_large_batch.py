"""The example learns, as one process and under Paddle's launcher, in chunks of the size it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

SCRIPT = ROOT / "examples" / "large_batch.py"
NUM_STEPS = 10


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_it_learns(num_ranks: int, tmp_path: Path) -> None:
    launcher = []
    if num_ranks > 1:
        launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(num_ranks)]
        launcher += ["--log_dir", str(tmp_path)]
    sizes = ["--pairs", "64", "--chunk-tokens", "128", "--steps", str(NUM_STEPS)]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *sizes],
        env={**_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(
        r"^step \d+  loss (\S+)  temperature (\S+)  chunks (\d+)$", done.stdout, re.MULTILINE
    )
    assert len(steps) == NUM_STEPS
    losses = [float(loss) for loss, _, _ in steps]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert len({temperature for _, temperature, _ in steps}) > 1
    # About 64 / num_ranks texts a side, of 14 letters on average, 128 at a time.
    assert all(5 < int(chunks) * num_ranks < 32 for _, _, chunks in steps)


def test_it_is_short_enough_to_copy() -> None:
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) < 150


def _environment() -> dict[str, str]:
    """Without what makes a process a rank, should the tests run under a launcher themselves."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
