"""Points of the front of peak against time: the smallest peak, and the next faster one."""

from __future__ import annotations

from paddle_recompute.planner.costs import PLAIN, WHOLE, StepCosts
from paddle_recompute.planner.policies import uniform
from paddle_recompute.planner.simulate import Choice, simulate
from paddle_recompute.planner.solve import Solution, solve


def smallest(costs: StepCosts) -> Solution:
    """The choices with the smallest peak, found by bisection of the budget."""
    uniforms = (uniform(costs, WHOLE), uniform(costs, PLAIN))
    best = min((Solution(one, simulate(costs, one)) for one in uniforms), key=lambda one: one.peak)
    low, high = costs.base, best.peak
    while high - low > max(1, (high - costs.base) // 4096):
        middle = (low + high) // 2
        found = solve(costs, middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(found.peak, middle)
    return best


def next_faster(costs: StepCosts, seconds: float, budget: int) -> Solution | None:
    """The solution of the smallest budget above `budget` that takes less than `seconds`.

    None: nothing is faster. Between `budget` and its peak no choice of the options lies, so bytes
    of a budget below it cannot be used.
    """
    plain = tuple(Choice(n, n, PLAIN) for n in range(len(costs.calls)))
    best = Solution(plain, simulate(costs, plain))
    if best.seconds >= seconds * (1 - 1e-9):
        return None
    low, high = budget, best.peak
    while high - low > max(1, (best.peak - costs.base) // 4096):
        middle = (low + high) // 2
        found = solve(costs, middle)
        if found is not None and found.seconds < seconds * (1 - 1e-9):
            best, high = found, min(found.peak, middle)
        else:
            low = middle
    return best
