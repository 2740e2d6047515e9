"""The planner's search: which calls to recompute, so that a step stays within a budget of bytes and
takes the least time. A call is plain, recomputed, or recomputed except for the parts of ``keep``.

If the backward visits the calls in the reverse order of the forward, they form a chain, and the
calls that are alive at an `Event` (after their forward, before their backward) are the first ones
of it. So a dynamic program goes along the chain with labels (bytes kept, seconds of recompute). It
drops a label that another one beats in both, and one whose bytes exceed the room that an event
leaves. If the backward has another order (two towers that take turns), this counts more calls as
alive than are; then `simulate` lets some more calls be plain.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from paddle_recompute.errors import PlanError
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.planner.costs import (
    KEEP,
    PLAIN,
    StepCosts,
    Timeline,
    Units,
    keeping,
    simulate,
)
from paddle_recompute.recompute import grouped

MAX_LABELS = 1000
"""Labels after one call; of more than these, equally spaced ones are kept."""
SAME = 1 - 1e-9
"""A time is less than another only below this factor of it: equal sums differ in the last bits."""


@dataclass(frozen=True)
class Solution:
    """What is recomputed, and what that comes to.

    Attributes:
        whole: The units that are recomputed.
        timeline: Of the step.
        exact: Whether no other choice is faster within the budget, as far as bytes were measured.
    """

    whole: Units
    timeline: Timeline
    exact: bool = True

    @property
    def peak(self) -> int:
        """Bytes."""
        return self.timeline.peak.bytes

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.timeline.seconds


def uniform(costs: StepCosts, option: str) -> Units:
    """All calls alike: none is recomputed for ``"plain"``, else all are."""
    return () if option == PLAIN else tuple(costs.units)


def choices_of_policy(costs: StepCosts, config: RecomputeConfig | None) -> Units:
    """The calls that `config` recomputes: those of the Layers that it selects; with its `keep`.

    Raises:
        PlanError: The policy is ``budget`` or ``segments``.
    """
    if config is None or not config.enable:
        return ()
    if config.policy in ("budget", "segments"):
        raise PlanError(f"policy: {config.policy} is not estimated; use plan()")
    groups = grouped(list(dict.fromkeys(call.layer for call in costs.calls)), config)
    chosen = {name for names in groups for name in names}
    units = tuple(unit for unit in costs.units if unit[0] in chosen)
    return _with_parts(costs, units) if config.keep else units


def _with_parts(costs: StepCosts, units: Collection[tuple[str, int]]) -> Units:
    """The `units`, recomputed except for their kept parts where they have some."""
    some = {call.unit for call in costs.calls if call.has_parts}
    return tuple((*unit, KEEP) if unit in some else unit for unit in units)


def _solution(costs: StepCosts, whole: Collection[Any], exact: bool = True) -> Solution:
    chosen = tuple(
        choice for unit in costs.units for choice in (unit, (*unit, KEEP)) if choice in whole
    )
    return Solution(chosen, simulate(costs, chosen), exact)


def smallest(costs: StepCosts) -> Solution:
    """The solution with the smallest peak: of all choices in a chain, to a 4096th of the step's
    bytes; else of those that the search finds.
    """
    kept = list(dict.fromkeys(call.unit for call in costs.calls if call.kept > 0))
    alike = (kept, costs.units, _with_parts(costs, kept), _with_parts(costs, costs.units), ())
    least = min((_solution(costs, choices) for choices in alike), key=lambda found: found.peak)
    chain, low, close = _Chain(costs), costs.base, max(1, (least.peak - costs.base) // 4096)
    while least.peak - low > close:
        middle = (low + least.peak) // 2
        whole = chain.fastest(middle - costs.base - costs.excess)
        found = least if whole is None else _solution(costs, whole, chain.is_exact)
        if found.peak < least.peak:
            least = found
        else:
            low = middle
    return least


def solve(costs: StepCosts, budget: int) -> Solution | None:
    """The fastest choice with a peak of at most `budget` bytes; None if there is none.

    Args:
        costs: Of the step.
        budget: In bytes, parameters and moments included.
    """
    plain = _solution(costs, ())
    if plain.peak <= budget:  # nothing is faster; the search could return another one as fast
        return plain
    chain = _Chain(costs)
    whole = chain.fastest(budget - costs.base - costs.excess)
    if whole is None:
        if chain.is_exact:  # the search in a chain misses nothing
            return None
        least = smallest(costs)
        if least.peak > budget:
            return None
        whole = set(least.whole)
    if not chain.is_exact:
        for choice in sorted(whole, key=lambda choice: -chain.seconds[choice[:2]]):
            if _solution(costs, whole - {choice}).peak <= budget:
                whole = whole - {choice}
    return _solution(costs, whole, chain.is_exact)


def next_faster(costs: StepCosts, seconds: float, budget: int) -> Solution | None:
    """The solution within the smallest budget above `budget` with which a step takes less than
    `seconds`; None: nothing is faster.
    """
    best = _solution(costs, ())
    if best.seconds >= seconds * SAME:
        return None
    low, high, close = budget, best.peak, max(1, (best.peak - costs.base) // 4096)
    while high - low > close:
        middle = (low + high) // 2
        found = solve(costs, middle)
        if found is None or found.seconds >= seconds * SAME:
            low = middle
        else:
            best, high = found, min(found.peak, middle)
    return best


class _Chain:
    """The units in the reverse order of their backwards, and the measured peaks around them.

    Attributes:
        seconds: That the recompute of each unit takes in a step.
        is_exact: Whether the calls that are alive are the first ones of the chain at every event.
    """

    def __init__(self, costs: StepCosts) -> None:
        calls = costs.calls
        back = [calls[e.call].unit for e in costs.events if e.kind == "again"]
        ahead = [unit for unit in costs.units if unit not in back]  # their graph is dropped
        self._order = [*ahead, *reversed(list(dict.fromkeys(back)))]
        places = {unit: index for index, unit in enumerate(self._order)}
        self.is_exact = True
        self.seconds = dict.fromkeys(self._order, 0.0)
        self._kept, self._parts = dict.fromkeys(self._order, 0), dict.fromkeys(self._order, 0)
        self._parts_seconds = dict.fromkeys(self._order, 0.0)
        self._with_parts = {call.unit for call in calls if call.has_parts}
        for call in calls:
            self.seconds[call.unit] += call.seconds
            self._parts_seconds[call.unit] += call.parts_seconds
            self._kept[call.unit] = max(self._kept[call.unit], call.kept)
            self._parts[call.unit] = max(self._parts[call.unit], call.parts_kept)
        count = len(self._order)
        # By how many first units may be alive; then by unit, while it runs recomputed, plain, or
        # with parts kept.
        self._peak_around = [0] * (count + 1)
        self._peak_recomputed, self._peak_plain = [0] * count, [0] * count
        self._peak_partly = [0] * count
        alive: set[int] = set()
        level, with_backward = 0, costs.with_backward
        for event in costs.events:
            number = max((1 + places[calls[alive_call].unit] for alive_call in alive), default=0)
            self.is_exact &= number == len(alive)
            is_run = event.call >= 0 and event.kind in ("forward", "again")
            if is_run:
                place = places[calls[event.call].unit]
                # Alive beside it: all units before it, and those that are measured as alive.
                number = max(number, place)
            if is_run and number == place:
                self._peak_recomputed[place] = max(self._peak_recomputed[place], event.peak)
                call, is_first = calls[event.call], event.kind == "forward"
                rise, least = (call.rise, event.peak) if is_first else (0, 0)
                self._peak_plain[place] = max(self._peak_plain[place], least, level + rise)
                parts = call.parts_rise if is_first else call.parts_kept + call.parts_again
                self._peak_partly[place] = max(self._peak_partly[place], least, level + parts)
            else:
                self._peak_around[number] = max(self._peak_around[number], event.peak)
            level = event.level
            if event.kind == "forward" and event.call in with_backward:
                alive.add(event.call)
            elif event.kind == "before again":
                alive.discard(event.call)

    def fastest(self, room: int) -> set[tuple[Any, ...]] | None:
        """The units to recompute within `room` bytes; None if that is too little."""
        labels: list[tuple[int, float, int]] = [(0, 0.0, 0)]  # bytes, seconds, bits of units
        for index, unit in enumerate(self._order):
            limit = room - self._peak_around[index]
            if_recomputed = room - self._peak_recomputed[index]
            if_plain = room - self._peak_plain[index]
            kept, seconds = self._kept[unit], self.seconds[unit]
            found = [
                (size, time + seconds, bits | 1 << index)
                for size, time, bits in labels
                if size <= min(limit, if_recomputed)
            ]
            found += [
                (size + kept, time, bits)
                for size, time, bits in labels
                if size <= min(limit, if_plain)
            ]
            if unit in self._with_parts:
                parts, if_partly = self._parts[unit], room - self._peak_partly[index]
                partly = seconds - self._parts_seconds[unit]
                found += [
                    (size + parts, time + partly, bits | 1 << index + len(self._order))
                    for size, time, bits in labels
                    if size <= min(limit, if_partly)
                ]
            labels = _pareto_minimal(found)
        last = [label for label in labels if label[0] <= room - self._peak_around[-1]]
        if not last:
            return None
        bits = min(last, key=lambda label: label[1])[2]
        both = [*self._order, *keeping(self._order)]
        return {choice for index, choice in enumerate(both) if bits >> index & 1}


def _pareto_minimal(labels: list[tuple[int, float, int]]) -> list[tuple[int, float, int]]:
    found: list[tuple[int, float, int]] = []
    for label in sorted(labels):
        if not found or label[1] < found[-1][1] * SAME:
            found.append(label)
    step = -(-len(found) // MAX_LABELS)
    return found[::-step][::-1] if step > 1 else found
