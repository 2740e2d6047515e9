"""Options that recompute parts of a Layer: these are wrapped once, for all calls of the Layer.

So all calls of a Layer have one partial option, or none has one. A call that is recomputed whole
would recompute its wrapped parts once more, and would hold what is recomputed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paddle_recompute.planner.costs import OFFLOADED, PLAIN, WHOLE, CallCost, OptionCost, StepCosts
from paddle_recompute.planner.simulate import JOINED, Choice


def is_partial(option: str) -> bool:
    """Whether `option` recomputes parts of a Layer."""
    return option not in (PLAIN, WHOLE, OFFLOADED, JOINED)


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
    """The choices, with one partial option for all calls of a Layer, or none.

    Where its calls have different ones, all get the one that keeps least; where one of its calls is
    recomputed whole, so are those with a partial option.
    """
    wanted: dict[str, set[str]] = {}
    whole: set[str] = set()
    for choice in choices:
        layers = {call.layer for call in costs.calls[choice.first : choice.last + 1]}
        if is_partial(choice.option):
            wanted.setdefault(layers.pop(), set()).add(choice.option)
        elif choice.option != PLAIN:
            whole |= layers

    def of_layer(choice: Choice) -> Choice:
        call = costs.calls[choice.first]
        own = wanted.get(call.layer)
        if own is None or not (choice.option == PLAIN or is_partial(choice.option)):
            return choice
        if call.layer in whole:
            return choice if choice.option == PLAIN else replace(choice, option=WHOLE)
        parts = [name for name in call.options if is_partial(name)]
        usable = [name for name in parts if len(own) > 1 or name in own]
        if not usable:
            return choice
        return replace(choice, option=min(usable, key=lambda name: call.options[name].kept))

    return tuple(map(of_layer, choices))
