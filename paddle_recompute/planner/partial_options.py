"""Options that recompute parts of a Layer: these are wrapped once, for all calls of the Layer.

So the calls of a Layer that are not recomputed whole have one partial option, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paddle_recompute.planner.costs import OFFLOADED, PLAIN, WHOLE, CallCost, OptionCost, StepCosts
from paddle_recompute.planner.simulate import JOINED, NESTED, Choice


def is_partial(option: str) -> bool:
    """Whether `option` recomputes parts of a Layer."""
    return option not in (PLAIN, WHOLE, OFFLOADED, JOINED, NESTED)


def layers_called_again(costs: StepCosts) -> set[str]:
    """The Layers with partial options that are called more than once in a pass."""
    return {
        call.layer for call in costs.calls if call.number and any(map(is_partial, call.options))
    }


def without_parts(costs: StepCosts, layers: set[str]) -> StepCosts:
    """The costs without the partial options of `layers`."""

    def options_of(call: CallCost) -> dict[str, OptionCost]:
        if call.layer not in layers:
            return call.options
        return {name: cost for name, cost in call.options.items() if not is_partial(name)}

    return replace(
        costs, calls=tuple(replace(call, options=options_of(call)) for call in costs.calls)
    )


def alike(costs: StepCosts, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices, with one partial option for all calls of a Layer that are not recomputed whole.

    Where the calls have different ones, all get the one that keeps least.
    """
    wanted: dict[str, set[str]] = {}
    for choice in choices:
        if is_partial(choice.option):
            wanted.setdefault(costs.calls[choice.first].layer, set()).add(choice.option)

    def of_layer(choice: Choice) -> Choice:
        call = costs.calls[choice.first]
        own = wanted.get(call.layer)
        if own is None or not (choice.option == PLAIN or is_partial(choice.option)):
            return choice
        parts = [name for name in call.options if is_partial(name)]
        usable = [name for name in parts if len(own) > 1 or name in own]
        if not usable:
            return choice
        return replace(choice, option=min(usable, key=lambda name: call.options[name].kept))

    return tuple(map(of_layer, choices))
