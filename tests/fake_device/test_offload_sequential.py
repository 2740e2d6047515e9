"""OffloadSequential with ``offload="host"``: a stack that the device cannot hold trains on it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from paddle_recompute.errors import ConfigError
from paddle_recompute.options import AmpConfigs
from tests.bits import assert_same_bits
from tests.fake_device import switches
from tests.offload.chains import offloaded, plain, train
from tests.processes import python

PLENTY_MB = 1024


def run(kind: str, memory_mb: int) -> subprocess.CompletedProcess[str]:
    return python(
        *("-m", "tests.fake_device.bounded", kind, str(memory_mb)),
        # Paddle takes memory of the device in pieces of this size, and keeps it.
        env={**switches.environment(), "FLAGS_auto_growth_chunk_size_in_mb": "1"},
        fails=True,
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


@pytest.mark.parametrize("place", ["host", "disk"])
def test_mixed_precision_gives_the_bits_of_the_plain_chain(place: str) -> None:
    """The loss scale of float16 is taken out of a shard's gradients when they leave the device."""
    amp = AmpConfigs(dtype="float16", level="O1", init_loss_scaling=2.0**12)
    expected = train(plain(), steps=3, amp=amp)
    assert_same_bits(expected, train(offloaded(offload=place), steps=3, amp=amp))


def test_half_precision_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="level O2 casts the parameters"):
        train(offloaded(), steps=1, amp=AmpConfigs(dtype="float16", level="O2"))
