"""The solver against all choices that there are and against the clock, and its small parts."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import paddle
import pytest

from paddle_recompute import RecomputeConfig, plan
from paddle_recompute._paddle import memory
from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.errors import DependencyError, PlanError
from paddle_recompute.planner import (
    choices_of_policy,
    largest_that_fits,
    make_plan,
    next_faster,
    simulate,
    smallest,
    solve,
)
from tests.planner.chains import chain, every_choice

ROUNDING = 1e-9
"""Sums of the same seconds in another order."""


@pytest.mark.parametrize("length", [5, 7])
@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_fastest_of_all_choices(length: int, seed: int) -> None:
    costs = chain(length, seed)
    every = [
        (found.peak.bytes, found.seconds)
        for choices in every_choice(costs)
        for found in [simulate(costs, choices)]
    ]
    lowest = min(peak for peak, _ in every)
    plain = simulate(costs, ()).peak.bytes
    assert smallest(costs).peak == lowest and solve(costs, lowest - 1) is None
    for tenth in range(11):
        budget = lowest + (plain - lowest) * tenth // 10
        found = solve(costs, budget)
        assert found is not None and found.exact
        assert found.peak <= budget
        fastest = min(seconds for peak, seconds in every if peak <= budget)
        assert found.seconds == pytest.approx(fastest, rel=ROUNDING)


def test_the_smallest_budget_of_an_error_is_one_that_can_be_met() -> None:
    costs = chain(6, 4)
    with pytest.raises(PlanError) as error:
        make_plan(costs, 1, signature="")
    named = int(str(error.value).partition("(")[2].partition(" bytes")[0])
    found = make_plan(costs, named, signature="")
    assert f"smallest feasible budget {format_bytes(named)}," in str(found)


def test_nothing_is_recomputed_where_the_plain_step_fits() -> None:
    costs = chain(6, 4)
    costs = replace(costs, calls=tuple(replace(c, seconds=0.0) for c in costs.calls))
    plain = ()
    peak = simulate(costs, plain).peak.bytes
    found, tighter = solve(costs, peak), solve(costs, peak - 1)
    assert found is not None and found.whole == plain and found.exact
    assert tighter is not None and tighter.whole != plain


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_96_calls_are_solved_at_once(alike: bool, share: float) -> None:
    costs = chain(96, 3, alike=alike)
    plain = simulate(costs, ()).peak.bytes
    began = time.process_time()
    solve(costs, int(plain * share))
    assert time.process_time() - began < 1


def test_between_a_plan_and_the_next_faster_one_there_is_nothing() -> None:
    costs = chain(6, 5)
    peaks = sorted(
        (found.peak.bytes, found.seconds)
        for choices in every_choice(costs)
        for found in [simulate(costs, choices)]
    )
    budget = (smallest(costs).peak + peaks[-1][0]) // 2
    held = solve(costs, budget)
    assert held is not None
    found = next_faster(costs, held.seconds, budget)
    least = min(peak for peak, seconds in peaks if seconds < held.seconds * (1 - 1e-9))
    assert found is not None and least <= found.peak <= least * 1.001
    plain = min(seconds for _, seconds in peaks)
    assert next_faster(costs, plain, budget) is None


def test_what_a_step_took_more_than_predicted_counts_as_held() -> None:
    costs = chain(8, 1)
    budget = (smallest(costs).peak + costs.base) * 3 // 4 + 2000
    found = solve(costs, budget)
    assert found is not None
    tighter = solve(replace(costs, excess=200), budget)
    assert tighter is None or tighter.seconds >= found.seconds


# ------------------------------------------------------------- the largest number that fits


def test_the_largest_number_that_fits() -> None:
    """Without a try above twice of it; within a share of it, where that is enough."""
    for largest, most in itertools.product(range(21), (1, 7, 8, 20)):
        found = largest_that_fits(lambda n, largest=largest: n <= largest, most)
        assert found == (min(largest, most) or None), (largest, most)
    tried: list[int] = []
    assert largest_that_fits(lambda n: tried.append(n) or n <= 100, 2**20, least=3) == 100
    assert max(tried) <= 200 and len(tried) < 20
    found = largest_that_fits(lambda n: n <= 1000, 2**20, least=5, close=64)
    assert found is not None and 1000 * 63 / 64 - 1 <= found <= 1000
    assert largest_that_fits(lambda n: n <= 4, 100, least=5) is None


def test_policies_group_as_training_does() -> None:
    """Also where they are refused."""

    def chosen(**settings: Any) -> list[str]:
        found = choices_of_policy(chain(5, 0), RecomputeConfig(**settings))
        return [name for name, _ in found]

    assert chosen() == [f"layers.{n}" for n in range(5)]
    assert chosen(policy="every_n", every_n=3) == ["layers.0", "layers.3"]
    with pytest.raises(PlanError, match="segments is not estimated"):
        chosen(policy="segments", segments=2)


@pytest.mark.skipif(memory.can_reset_peak(), reason="this Paddle can start the peak anew")
def test_a_paddle_that_cannot_measure_a_peak_is_refused() -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4))
    with pytest.raises(DependencyError, match="Paddle 3"):
        plan(model, paddle.randn([2, 4]), lambda m, x: m(x).mean(), memory_budget=2**30)
