"""Paired measurement: every variant once in each round, in turn, after some rounds to warm up.

Whatever slows the machine down slows neighbours in a round alike, so ratios within a round mean
something where absolute times do not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
Clock = Callable[[], float]
Spread = tuple[float, float, float]
"""Median, first and third quartile."""


def in_turn(
    steps: Mapping[str, Callable[[], T]],
    *,
    warm_up: int,
    rounds: int,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[T]]:
    """What every step returned in every round after `warm_up`; `between` is called before each.

    Every other round runs them backwards: what one leaves behind, such as garbage, would else
    always be a burden for the same next one.
    """
    found: dict[str, list[T]] = {name: [] for name in steps}
    for number in range(warm_up + rounds):
        for name in [*steps][:: -1 if number % 2 else 1]:
            between()
            value = steps[name]()
            if number >= warm_up:
                found[name].append(value)
    return found


def timed(step: Callable[[], object], *clocks: Clock) -> Callable[[], tuple[float, ...]]:
    """`step` as a function that returns its seconds by each of `clocks`."""

    def run() -> tuple[float, ...]:
        before = [clock() for clock in clocks]
        step()
        return tuple(clock() - start for clock, start in zip(clocks, before, strict=True))

    return run


def paired_seconds(
    variants: Mapping[str, Callable[[], object]],
    *,
    warm_up: int,
    rounds: int,
    clock: Clock = time.perf_counter,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of every variant in every round."""
    steps = {name: timed(step, clock) for name, step in variants.items()}
    found = in_turn(steps, warm_up=warm_up, rounds=rounds, between=between)
    return {name: [seconds for (seconds,) in values] for name, values in found.items()}


def quartiles(values: Sequence[float]) -> Spread:
    """Of one value, that value three times."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def ratios(seconds: Mapping[str, Sequence[float]], to: str) -> dict[str, Spread]:
    """Of each variant's time to `to`'s, taken within the rounds."""
    return {
        name: quartiles([a / b for a, b in zip(values, seconds[to], strict=True)])
        for name, values in seconds.items()
    }


def shown(spread: Spread, digits: int = 3) -> str:
    """``1.020 (1.016 to 1.023)``."""
    middle, low, high = (f"{one:.{digits}f}" for one in spread)
    return f"{middle} ({low} to {high})"
