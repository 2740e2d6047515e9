"""Costs of chains of calls, drawn and not measured, to solve and to simulate; what tests of the
planner share.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from paddle_recompute._paddle import memory
from paddle_recompute.planner.costs import CallCost, Event, StepCosts

measured = pytest.mark.skipif(
    not memory.can_reset_peak(), reason="2.6 cannot start the peak anew; see test_solve"
)
CLOSE = 0.01
"""What operators beside the blocks saved, and rows that meet, are predicted so closely."""


def chain(length: int, seed: int, *, alike: bool = False) -> StepCosts:
    """A chain of `length` calls with random costs; the same for all with `alike`."""
    draw = random.Random(seed)

    def size(low: int, high: int) -> int:
        return draw.randint(low, high) * 8

    calls: list[CallCost] = []
    for place in range(length):
        if not alike or not calls:
            kept, seconds = size(100, 400), draw.uniform(0.3, 1.2)
            rise = kept + size(5, 100)
        calls.append(CallCost(f"layers.{place}", 0, 0, kept, rise, seconds))
    events: list[Event] = []
    level = 50

    def event(kind: str, call: int, above: int, after: int, where: str) -> None:
        nonlocal level
        events.append(Event(kind, call, max(level, after) + above, after, where))  # type: ignore[arg-type]
        level = after

    for place in range(length):
        event("before forward", place, 20, level, f"before layers.{place}")
        event("forward", place, size(20, 100), level + size(5, 60), f"forward of layers.{place}")
    for place in reversed(range(length)):
        event("before again", place, size(10, 200), level - size(0, 3), f"before layers.{place}")
        after = level + calls[place].kept
        event("again", place, size(0, 50), after, f"second forward of layers.{place}")
        level -= calls[place].kept
    event("end", -1, 200, 50, "end")
    return StepCosts(1000, {}, tuple(calls), tuple(events), 3.0 * length)


def every_choice(costs: StepCosts) -> Iterator[tuple[tuple[str, int], ...]]:
    """All ways to treat the calls of `costs`."""
    for bits in itertools.product((False, True), repeat=len(costs.units)):
        yield tuple(unit for unit, is_whole in zip(costs.units, bits, strict=True) if is_whole)
