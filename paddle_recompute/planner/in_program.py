"""The costs of a call in a Program: those in dygraph, and by how much an option differs there.

A Program keeps the mask of a dropout, where dygraph draws it again. An output that is given up is
computed again for whatever takes it, also for a plain call and for operators beside the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import paddle

from paddle_recompute.errors import PlanError
from paddle_recompute.planner.costs import PLAIN, WHOLE, OptionCost, held_for_repetition

Treatments = Mapping[str, Callable[[paddle.nn.Layer], object]]
"""By option: wraps what it recomputes of the Layer that it is given."""
MeasureCall = Callable[[str, Any, Treatments, int], Mapping[str, tuple[float, int, int]]]
"""``measure(layer, (args, kwargs), treatments, ballast)``: of a call as a Program, by option, the
seconds of forward and backward, the bytes that are held between them, and the peak; differences
count.
"""


def costs_in_program(
    in_dygraph: Mapping[str, OptionCost],
    found: Mapping[str, tuple[float, int, int]],
    freed: Mapping[str, int],
) -> dict[str, OptionCost]:
    """The costs of a call by option.

    Args:
        in_dygraph: The costs in dygraph.
        found: What a `MeasureCall` returned, maybe without options that a Program cannot have.
        freed: By option, bytes of inputs that go after the forward. Costs count as if they stayed.

    Raises:
        PlanError: The call cannot be recomputed whole in a Program.
    """
    if WHOLE not in found:
        raise PlanError("a block cannot be recomputed in a Program; name others in checkpoints")
    plain = in_dygraph[PLAIN]
    plain_seconds, plain_held, plain_peak = found[PLAIN]
    one_more_forward = max(0.0, found[WHOLE][0] - plain_seconds)
    costs = {}
    for option, (seconds, held, peak) in found.items():
        cost = in_dygraph[option]
        stay = freed.get(option, 0) - freed.get(PLAIN, 0)
        kept = plain.kept + held - plain_held + stay
        in_program = replace(
            cost,
            kept=kept,
            backward_peak=plain.backward_peak + peak - plain_peak,
            seconds=max(plain_seconds, seconds),
            forward_seconds=one_more_forward,
            # The output that is given up is not among what is held; an output that nobody keeps
            # was not there to be given up.
            keeps_output=cost.keeps_output or (cost.offers_output and held != plain_held),
            offers_output=False,
            kept_by_plain=option == WHOLE,
        )
        costs[option] = replace(in_program, repeated=held_for_repetition(in_program, plain))
    return costs
