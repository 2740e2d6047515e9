"""What happens to a plan when a step under it is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paddle_recompute.errors import PlanError
from paddle_recompute.planner import (
    RecomputePlan,
    StepCosts,
    make_plan,
    simulate,
    smallest,
    uniform,
    within_budget,
)
from tests.planner.chains import chain


def planned(costs: StepCosts, part: float) -> RecomputePlan:
    low, high = smallest(costs).peak, make_plan(costs, 2**40, signature="").peak_bytes
    return make_plan(costs, int(low + (high - low) * part), signature="")


def exact(plan: RecomputePlan) -> int:
    return simulate(replace(plan.costs, excess=0), plan.choices).peak.bytes


def test_a_step_that_takes_more_is_planned_anew() -> None:
    found = planned(chain(6, 4), 0.6)
    kept = within_budget(found, lambda plan: exact(plan) + 900)
    assert kept.measured_bytes == exact(kept) + 900 <= found.memory_budget
    assert kept.choices != found.choices


@pytest.mark.parametrize("more", [-300, 0, 150])
def test_a_verified_plan_of_a_program_says_what_was_measured(more: int) -> None:
    found = planned(chain(6, 4), 0.6)

    def peak(plan: RecomputePlan) -> int:
        return exact(plan) + more * len(plan.choices)

    kept = within_budget(found, peak)
    assert kept.measured_bytes == kept.peak_bytes == peak(kept) <= found.memory_budget


def test_a_policy_by_hand_is_measured_before_a_budget_is_refused() -> None:
    """In a Program everything whole may take least, although the costs say otherwise."""
    found = planned(chain(6, 4), 0.5)
    whole = uniform(found.costs, "whole")

    def peak(plan: RecomputePlan) -> int:
        return found.memory_budget + (0 if plan.choices == whole else 1000)

    assert within_budget(found, peak).choices == whole


def test_the_smallest_plan_is_measured_before_a_budget_is_refused() -> None:
    found = planned(chain(6, 4), 0.5)
    least = smallest(found.costs).whole
    asked = []

    def peak(plan: RecomputePlan) -> int:
        asked.append(plan.hash)
        return exact(plan) if plan.choices == least else found.memory_budget + 1000

    assert within_budget(found, peak).choices == least
    assert len(asked) == len(set(asked)) <= 7
    assert within_budget(found, peak).choices == least
    with pytest.raises(PlanError, match=r"the smallest feasible budget is .* bytes, measured"):
        within_budget(found, lambda plan: found.memory_budget + 1)


def test_a_program_may_take_less_than_predicted() -> None:
    costs = chain(6, 4)
    low = smallest(costs).peak
    found = make_plan(costs, low - 500, signature="", or_smallest=True)
    assert found.choices == smallest(costs).whole
    kept = within_budget(found, lambda plan: exact(plan) - 1000)
    assert kept.measured_bytes is not None and kept.measured_bytes <= low - 500
    with pytest.raises(PlanError, match="smallest feasible budget"):
        make_plan(costs, low - 500, signature="")
