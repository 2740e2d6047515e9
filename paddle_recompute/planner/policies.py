"""What today's policies (`RecomputeConfig`) choose, in the terms of a plan: to compare them."""

from __future__ import annotations

import itertools
import math

from paddle_recompute.errors import PlanError
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.planner.costs import PLAIN, WHOLE, StepCosts
from paddle_recompute.planner.simulate import JOINED, Choice


def uniform(costs: StepCosts, option: str) -> tuple[Choice, ...]:
    """The same option for all calls."""
    return tuple(Choice(number, number, option) for number in range(len(costs.calls)))


def choices_of_policy(costs: StepCosts, config: RecomputeConfig | None) -> tuple[Choice, ...]:
    """What `config` does with the calls, whose Layers are those that it selects.

    Raises:
        PlanError: The policy is not one of ``all``, ``every_n`` and ``segments``.
    """
    if config is None or not config.enable:
        return uniform(costs, PLAIN)
    if config.policy == "all":
        return uniform(costs, WHOLE)
    if config.policy == "every_n":
        return every(costs, config.every_n)
    if config.policy == "segments":
        layers = len({call.layer for call in costs.calls})
        count = round(math.sqrt(layers)) if config.segments == "auto" else config.segments
        return segments(costs, count)
    raise PlanError(f"policy: {config.policy} is not a policy by hand; use plan()")


def every(costs: StepCosts, n: int) -> tuple[Choice, ...]:
    """The first, (n+1)th, ... Layer whole."""
    layers = list(dict.fromkeys(call.layer for call in costs.calls))
    chosen = set(layers[::n])
    return tuple(
        Choice(number, number, WHOLE if call.layer in chosen else PLAIN)
        for number, call in enumerate(costs.calls)
    )


def segments(costs: StepCosts, count: int) -> tuple[Choice, ...]:
    """`count` joined runs of nearly equal length, in each pass."""
    layers = list(dict.fromkeys(call.layer for call in costs.calls))
    bounds = [round(i * len(layers) / count) for i in range(count + 1)]
    group = {
        layer: place
        for place, (a, b) in enumerate(itertools.pairwise(bounds))
        for layer in layers[a:b]
    }
    found: list[Choice] = []
    for number, call in enumerate(costs.calls):
        last = found[-1] if found else None
        joins = (
            last is not None
            and call.follows == number - 1
            and group[costs.calls[last.first].layer] == group[call.layer]
        )
        if joins and last is not None:
            found[-1] = Choice(last.first, number, JOINED)
        else:
            found.append(Choice(number, number, WHOLE))
    return tuple(found)
