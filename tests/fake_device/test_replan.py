"""A step for which the device has too little memory is planned again, with Paddle's own error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paddle_recompute._paddle import memory
from tests.fake_device import switches
from tests.processes import python


@pytest.mark.skipif(not memory.can_reset_peak(), reason="2.6 cannot start the peak anew")
def test_a_device_that_is_full_leads_to_another_plan_with_the_same_losses(tmp_path: Path) -> None:
    done = python(
        *("-m", "tests.fake_device.replanned", tmp_path),
        # Paddle gives memory back to the device at once: the measurement's is not kept for later.
        env={
            **switches.environment(),
            "FLAGS_auto_growth_chunk_size_in_mb": "1",
            "FLAGS_free_idle_chunk": "1",
        },
        timeout=280,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["failures"] >= 1
    assert not told["plenty recomputes"] and told["short recomputes"], told
    assert told["excess"] >= 0.05 * told["budget"] * told["failures"] * 0.99
    assert len(told["losses"]) == 2
    assert told["again"] == told["losses"]  # the same bits
