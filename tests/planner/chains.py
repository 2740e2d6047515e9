"""Costs of chains of calls that nobody has measured, to solve and to simulate."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from paddle_recompute.planner.costs import CallCost, Event, OptionCost, StepCosts
from paddle_recompute.planner.simulate import JOINED, Choice

OPTIONS = ("plain", "whole")


def chain(length: int, seed: int, *, alike: bool = False) -> StepCosts:
    """A chain of `length` calls with random costs; the same for all with `alike`."""
    draw = random.Random(seed)

    def size(low: int, high: int) -> int:
        return draw.randint(low, high) * 8

    sizes = [size(5, 60) for _ in range(length + 1)]
    if alike:
        sizes = [sizes[0]] * (length + 1)
    calls: list[CallCost] = []
    for place in range(length):
        if not alike or not calls:
            options = _options(draw, size, sizes[place], sizes[place + 1])
            gradient = size(10, 100)
        calls.append(
            CallCost(
                layer=f"layers.{place}",
                number=0,
                pass_number=0,
                input_bytes=sizes[place],
                output_bytes=sizes[place + 1],
                output_is_kept=place < length - 1,
                follows=place - 1 if place else None,
                gradients={f"layers.{place}.weight": gradient},
                options=options,
            )
        )
    return StepCosts(1000, {}, tuple(calls), tuple(_events(sizes)))


def _options(draw: random.Random, size, before: int, after: int) -> dict[str, OptionCost]:  # type: ignore[no-untyped-def]
    kept = size(100, 400)
    forward, backward = kept + size(0, 50) + after, kept + size(10, 200) + after + before
    seconds = draw.uniform(1, 3)
    return {
        "plain": OptionCost(kept, forward, backward, seconds),
        "whole": OptionCost(
            size(0, 3),
            size(20, 100) + after,
            backward + 8,
            seconds * draw.uniform(1.28, 1.4),
        ),
    }


def _events(sizes: Sequence[int]) -> Iterator[Event]:
    level, length = 50, len(sizes) - 1
    for place in range(length):
        yield Event("forward", place, level + 20, level)
        level += sizes[place + 1]
    above = 200
    for place in reversed(range(length)):
        yield Event("backward", place, level + above, level + sizes[place + 1])
        level, above = level - sizes[place + 1], 10
    yield Event("end", -1, level + 200, level + 50)


def every_choice(length: int, options: Sequence[str]) -> Iterator[tuple[Choice, ...]]:
    """All ways to treat `length` calls, in segments too."""
    if length == 0:
        yield ()
        return
    for last in range(1, length + 1):
        start = length - last
        for rest in every_choice(start, options):
            for option in options if last == 1 else (JOINED,):
                yield (*rest, Choice(start, length - 1, option))
