"""What every test of recompute starts from, and what none may leave behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import paddle
import pytest

from paddle_recompute.recompute import is_recomputing
from tests.recompute.contract import clean_streams


@pytest.fixture(autouse=True)
def _start_clean_and_leave_clean() -> Iterator[None]:
    with clean_streams():
        yield
    assert not is_recomputing()
    assert paddle.is_grad_enabled()
    # Paddle allows one pair at a time: this raises if a test, or recompute, left one behind.
    with paddle.autograd.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        pass


@pytest.fixture(scope="session")
def peaks() -> dict[str, int]:
    """The peak bytes of every step in ``tests/recompute/peaks.py``."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.recompute.peaks"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])
