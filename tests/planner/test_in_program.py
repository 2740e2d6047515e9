"""What a call costs as a Program, out of what it costs in dygraph and how the options differ."""

from __future__ import annotations

import pytest

from paddle_recompute.errors import PlanError
from paddle_recompute.planner.costs import OptionCost
from paddle_recompute.planner.in_program import costs_in_program

IN_DYGRAPH = {
    "plain": OptionCost(kept=1000, forward_peak=1200, backward_peak=2000, seconds=1.0),
    "selective": OptionCost(
        kept=700, forward_peak=1200, backward_peak=2000, seconds=1.1, offers_output=True
    ),
    "whole": OptionCost(kept=0, forward_peak=900, backward_peak=2000, seconds=1.5),
}
FOUND = {
    "plain": (1.0, 5000, 9000),
    "selective": (1.2, 4600, 8900),
    "whole": (1.6, 4100, 9100),
}


def test_an_option_differs_from_the_plain_call_as_in_a_program() -> None:
    costs = costs_in_program(IN_DYGRAPH, FOUND, {})
    assert [costs[name].kept for name in FOUND] == [1000, 600, 100]
    assert [costs[name].backward_peak for name in FOUND] == [2000, 1900, 2100]
    assert [costs[name].seconds for name in FOUND] == [1.0, 1.2, 1.6]
    assert [costs[name].keeps_output for name in FOUND] == [False, True, False]
    assert [costs[name].repeated for name in FOUND] == [0, 300, 1000]


def test_an_input_that_the_plain_call_gives_up_is_held_for_the_whole_one() -> None:
    """An LSTM keeps a copy of its input. Costs count as if the input were there in any case."""
    costs = costs_in_program(IN_DYGRAPH, FOUND, {"plain": 100, "selective": 100})
    assert [costs[name].kept for name in FOUND] == [1000, 600, 0]


def test_what_no_program_can_repeat_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot be recomputed in a Program"):
        costs_in_program(IN_DYGRAPH, {"plain": FOUND["plain"]}, {})
