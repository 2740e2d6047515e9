"""A plan that lets inputs of blocks wait on the host, on a device whose copies take time."""

from __future__ import annotations

import pytest

from paddle_recompute._paddle import memory
from paddle_recompute.planner import smallest
from paddle_recompute.planner.planning import measured_peak
from tests.planner.test_offloaded_inputs import wide_job, without
from tests.planner.test_plan import gradients_of, planned

pytestmark = pytest.mark.skipif(not memory.can_reset_peak(), reason="plans need Paddle 3")


def test_a_budget_is_met_that_recompute_alone_cannot_meet() -> None:
    job = wide_job(offload="host")
    costs = job.measure()
    low, alone = smallest(costs).peak, smallest(without(costs)).peak
    assert low < alone
    found = planned(job, (low + alone) // 2, offload="host")
    assert ": offloaded, " in str(found)
    assert measured_peak(job, found) <= found.memory_budget
    for plain, other in zip(gradients_of(job, None), gradients_of(job, found), strict=True):
        assert plain.tobytes() == other.tobytes()
