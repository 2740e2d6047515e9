"""OffloadSequential with ``offload="host"``: a stack that the device cannot hold trains on it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.fake_device import switches
from tests.ranks import ROOT

PLENTY_MB = 1024


def run(kind: str, memory_mb: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fake_device.bounded", kind, str(memory_mb)],
        cwd=ROOT,
        # Paddle takes memory of the device in pieces of this size, and keeps it.
        env={**switches.environment(), "FLAGS_auto_growth_chunk_size_in_mb": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_stack_that_the_device_cannot_hold_trains_on_it() -> None:
    plain = told(run("plain", PLENTY_MB))
    limit_mb = plain["peak"] // 6 // 2**20
    refused = run("plain", limit_mb)
    assert refused.returncode != 0 and "memory" in refused.stderr
    offloaded = told(run("offloaded", limit_mb))
    assert offloaded["losses"] == plain["losses"]
    assert offloaded["peak"] <= plain["peak"] / 6
