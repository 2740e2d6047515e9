"""The bytes of a step under a plan, event by event.

The level at an event is that of the skeleton, plus what the calls before it keep, plus the
gradients of the parameters whose backward is over. Inside a call its own forward or backward peak
stands on top. Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paddle_recompute.planner.costs import (
    PLAIN,
    WHOLE,
    CallCost,
    Event,
    Gradients,
    OptionCost,
    StepCosts,
)

JOINED = "joined"
"""Neighbouring calls that are recomputed together: a segment."""


@dataclass(frozen=True)
class Choice:
    """What is done with the calls from `first` to `last`.

    Attributes:
        first: Number of the first call.
        last: Number of the last call; the same for an option of one call.
        option: One of the measured options, or `JOINED`.
    """

    first: int
    last: int
    option: str

    def __len__(self) -> int:
        return self.last - self.first + 1


@dataclass(frozen=True)
class Point:
    """A peak of the timeline.

    Attributes:
        where: The call, or what is between two calls.
        bytes: Held at this moment, all in all.
        gradients: Of these, gradients of parameters of blocks.
        kept: What earlier calls keep beyond their inputs; negative where inputs are given up.
        inside: What the call itself takes now.
    """

    where: str
    bytes: int
    gradients: int = 0
    kept: int = 0
    inside: int = 0


@dataclass(frozen=True)
class Timeline:
    """The bytes of one step.

    Attributes:
        points: In order.
        seconds: Of the step.
    """

    points: tuple[Point, ...]
    seconds: float

    @property
    def peak(self) -> Point:
        """The point with the most bytes."""
        return max(self.points, key=lambda point: point.bytes)


def simulate(costs: StepCosts, choices: Sequence[Choice]) -> Timeline:
    """The bytes and seconds of a step under `choices`, which cover its calls in order."""
    seconds = costs.glue_seconds + sum(seconds_of(costs.calls, choice) for choice in choices)
    return Timeline(tuple(_points(costs, choices)), seconds)


def seconds_of(calls: Sequence[CallCost], choice: Choice) -> float:
    """Seconds of the calls of `choice`, forward and backward."""
    own = calls[choice.first : choice.last + 1]
    return sum(call.options[own_option(choice)].seconds for call in own)


def own_option(choice: Choice) -> str:
    """The option whose measured costs a single call of `choice` has."""
    return WHOLE if choice.option == JOINED else choice.option


def kept_bytes(calls: Sequence[CallCost], number: int, cost: OptionCost) -> int:
    """What one call adds to the level of the skeleton, if it does not give up its input."""
    call = calls[number]
    kept = cost.kept - freed_bytes(calls, number, cost)
    return kept + call.output_bytes if cost.keeps_output and not call.output_is_kept else kept


def given_up_bytes(calls: Sequence[CallCost], number: int, cost: OptionCost) -> int:
    """What a call does not keep of its input where it is computed again for it, and would else."""
    return calls[number].input_bytes - freed_bytes(calls, number, cost)


def repeated_bytes(calls: Sequence[CallCost], number: int, first: int) -> int:
    """What a call of a segment from `first` on keeps when the segment has run again."""
    options = calls[number].options
    return options[PLAIN].kept + options[WHOLE].kept - freed_again(calls, number, JOINED, first)


def freed_again(calls: Sequence[CallCost], number: int, option: str, first: int) -> int:
    """The input that is not there any more in the backward of a call."""
    if option == JOINED and number == first:  # the segment holds it
        return 0
    # A call that is recomputed whole gives its input to the plain call that it repeats.
    return freed_bytes(calls, number, calls[number].options[PLAIN])


def freed_bytes(calls: Sequence[CallCost], number: int, cost: OptionCost) -> int:
    """The input of a call that keeps a copy of it (an LSTM)."""
    return min(cost.frees_input, calls[number].input_bytes)


def _points(costs: StepCosts, choices: Sequence[Choice]) -> Iterator[Point]:
    calls = costs.calls
    choice_of = {n: choice for choice in choices for n in range(choice.first, choice.last + 1)}
    cost_of = {n: calls[n].options[own_option(choice)] for n, choice in choice_of.items()}
    kept = {n: kept_bytes(calls, n, cost) for n, cost in cost_of.items()}
    for n, choice in choice_of.items():
        if n > choice.first:  # the segment computes its input again
            kept[n] -= given_up_bytes(calls, n, cost_of[n])
    base = costs.base + costs.excess
    above = 0  # bytes of the calls, above the skeleton
    live: dict[int, int] = {}  # what each call of a segment that runs again keeps
    present = Gradients(costs)
    running: dict[int, int] = {}  # what calls whose backwards have begun hold until they end
    seen_to_end = {event.call for event in costs.events if event.kind == "done"}
    for event in costs.events:
        gradients = present.bytes
        level = base + above + gradients
        yield Point(_before(event, calls), level + event.before, gradients, above)
        number = event.call
        if event.kind == "done":
            running.pop(number, None)
        if number < 0 or event.kind == "done":
            continue
        call, cost, choice = calls[number], cost_of[number], choice_of[number]
        level += event.enter
        if event.kind == "forward":
            peak = cost.forward_peak
            yield Point(f"forward of {call.name}", level + peak, gradients, above, peak)
            above += kept[number]
            continue
        if event.kind == "dropped":
            above -= kept[number]
            continue
        level -= call.output_bytes  # its gradient, which is part of the measured peak
        if number < choice.last:
            change = -live.pop(number)
            cost = call.options[PLAIN]
        else:
            change = -sum(kept[inner] for inner in range(choice.first, number + 1))
            for inner in range(choice.first, number):
                plain = calls[inner].options[PLAIN]
                yield Point(
                    f"second forward of {calls[inner].name}",
                    level + change + plain.forward_peak,
                    gradients,
                    above + change,
                    plain.forward_peak,
                )
                live[inner] = repeated_bytes(calls, inner, choice.first)
                change += live[inner]
        above += change
        # The operators of calls that do not depend on each other take turns.
        inside = sum(running.values()) + cost.backward_peak
        inside -= freed_again(calls, number, choice.option, choice.first)
        if number in seen_to_end:
            running[number] = cost.kept + cost.repeated
        where = f"backward of {call.name}"
        yield Point(where, level + change + inside, gradients, above, inside)
        present.add(number)


def _before(event: Event, calls: Sequence[CallCost]) -> str:
    if event.kind == "end":
        return "end of the backward"
    if event.kind == "update":
        return "update"
    if event.kind == "done":
        return f"end of the backward of {calls[event.call].name}"
    return f"before the {event.kind} of {calls[event.call].name}"
