"""What today's policies (`RecomputeConfig`) choose, in the terms of a plan: to compare them."""

from __future__ import annotations

from paddle_recompute.errors import PlanError
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.planner.costs import PLAIN, WHOLE, StepCosts
from paddle_recompute.planner.simulate import JOINED, Choice
from paddle_recompute.recompute import grouped


def uniform(costs: StepCosts, option: str) -> tuple[Choice, ...]:
    """The same option for all calls."""
    return tuple(Choice(number, number, option) for number in range(len(costs.calls)))


def choices_of_policy(costs: StepCosts, config: RecomputeConfig | None) -> tuple[Choice, ...]:
    """What `config` does with the calls, whose Layers are those that it selects.

    Raises:
        PlanError: The policy is ``budget``.
        SelectionError: It asks for more segments than there are Layers.
    """
    if config is None or not config.enable:
        return uniform(costs, PLAIN)
    if config.policy == "budget":
        raise PlanError("policy: budget is not a policy by hand; use plan()")
    groups = grouped(list(dict.fromkeys(call.layer for call in costs.calls)), config)
    group_of = {layer: place for place, names in enumerate(groups) for layer in names}
    found: list[Choice] = []
    for number, call in enumerate(costs.calls):
        group, before = group_of.get(call.layer), costs.calls[number - 1]
        if group is None:
            found.append(Choice(number, number, PLAIN))
        elif (
            number
            and call.follows == number - 1
            and group == group_of.get(before.layer)
            and len(groups[group]) > 1
        ):
            found[-1] = Choice(found[-1].first, number, JOINED)
        else:
            found.append(Choice(number, number, WHOLE))
    return tuple(found)
