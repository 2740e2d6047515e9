"""What was measured of a step, as plain data that JSON can hold, and what it takes under choices.

One real step is measured, with every call of a block recomputed (`measure_costs`). A plain call
keeps its activations from its forward to its backward, and has no second forward: so the bytes of a
step in which some calls are plain are those of the measured one, plus what these calls keep then. A
call that keeps parts (``recompute.keep``) adds these until the end of its second forward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from paddle_recompute.errors import PlanError

PLAIN = "plain"
WHOLE = "whole"
Units = tuple[tuple[str, int] | tuple[str, int, str], ...]
"""Calls that are recomputed: name of the Layer, which of its calls in a pass, and `KEEP` where the
second forward does not run the parts of ``recompute.keep``.
"""
KEEP = "keep"


@dataclass(frozen=True)
class CallCost:
    """One call of a block in a step.

    Attributes:
        layer: Its name in the model.
        number: Which call of this Layer in its pass it is, from 0.
        pass_number: The pass that it is of: all forwards and backwards until no forward waits for
            its backward any more. A step has one pass, or one for each chunk of a gradient cache.
        kept: Bytes that it keeps until its backward if it is plain, beyond those that it keeps if
            it is recomputed.
        rise: Most bytes during a plain forward, above the level at its begin.
        seconds: That its recompute takes.
        parts_kept: Bytes that its parts keep until the end of its recompute.
        parts_rise: As `rise`, of its forward if the parts are kept.
        parts_again: As `rise`, of its recompute then.
        parts_seconds: That its recompute does not take then; 0: no parts are kept.
    """

    layer: str
    number: int
    pass_number: int
    kept: int = 0
    rise: int = 0
    seconds: float = 0.0
    parts_kept: int = 0
    parts_rise: int = 0
    parts_again: int = 0
    parts_seconds: float = 0.0

    @property
    def has_parts(self) -> bool:
        """Whether a pattern of ``keep`` selects a part of it."""
        return bool(self.parts_rise or self.parts_again)

    @property
    def name(self) -> str:
        """``encoder.layers.3``, or ``encoder.layers.3#2`` for its second call."""
        return f"{self.layer}#{self.number + 1}" if self.number else self.layer

    @property
    def unit(self) -> tuple[str, int]:
        """What a plan treats alike: this call in all passes."""
        return self.layer, self.number


@dataclass(frozen=True)
class Event:
    """What ends here, with every call recomputed; bytes above the start of the step.

    Attributes:
        kind: The first ``forward`` or the second one (``again``) of a call; ``before`` either: what
            ran since the event before, such as the backward of another call; ``end``, ``update``.
        call: Number of the call; -1 for ``end`` and ``update``.
        peak: Since the event before.
        level: At this event.
        where: For people.
        time: Since the start of the step, in seconds.
    """

    kind: Literal["before forward", "forward", "before again", "again", "end", "update"]
    call: int
    peak: int
    level: int
    where: str
    time: float = 0.0


@dataclass(frozen=True)
class Point:
    """A peak of the timeline: where, all bytes that are held, and those that plain calls and parts
    keep.
    """

    where: str
    bytes: int
    kept: int = 0


@dataclass(frozen=True)
class Timeline:
    """The bytes of one step, point by point, and its seconds."""

    points: tuple[Point, ...]
    seconds: float

    @property
    def peak(self) -> Point:
        """The point with the most bytes."""
        return max(self.points, key=lambda point: point.bytes)


@dataclass(frozen=True)
class StepCosts:
    """Everything that was measured of a step.

    Attributes:
        base: Bytes held at the start of each step: the parts of `held`, and what else there is.
        held: The parts of `base` that are known: parameters, moments, masters, batch, gradients.
        calls: The calls of blocks, in the order of their forwards.
        events: What happens in a step, in order.
        recomputed_seconds: Of a step with every call recomputed.
        excess: Bytes that a verified step took beyond its prediction.
    """

    base: int
    held: dict[str, int]
    calls: tuple[CallCost, ...]
    events: tuple[Event, ...]
    recomputed_seconds: float = 0.0
    excess: int = 0

    @property
    def seconds(self) -> float:
        """Of a plain step."""
        return self.recomputed_seconds - sum(call.seconds for call in self.calls)

    @property
    def units(self) -> list[tuple[str, int]]:
        """What a plan treats alike, in the order of the forwards."""
        return list(dict.fromkeys(call.unit for call in self.calls))

    @property
    def with_backward(self) -> set[int]:
        """The calls whose graph is not dropped."""
        return {event.call for event in self.events if event.kind == "again"}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepCosts:
        """The inverse of `to_dict`."""
        calls = tuple(CallCost(**call) for call in data["calls"])
        return cls(**{**data, "calls": calls, "events": tuple(Event(**e) for e in data["events"])})


def keeping(units: Collection[tuple[str, int]]) -> Units:
    """The `units`, recomputed except for their kept parts."""
    return tuple((*unit, KEEP) for unit in units)


def simulate(costs: StepCosts, whole: Collection[tuple[Any, ...]]) -> Timeline:
    """The bytes and seconds of a step in which the units of `whole` are recomputed."""
    keep = {choice[:2]: len(choice) > 2 for choice in whole}
    plain = {n for n, call in enumerate(costs.calls) if call.unit not in keep}
    partly = {n for n, call in enumerate(costs.calls) if call.has_parts and keep.get(call.unit)}
    seconds = costs.recomputed_seconds - sum(costs.calls[n].seconds for n in plain)
    seconds -= sum(costs.calls[n].parts_seconds for n in partly)
    return Timeline(tuple(_points(costs, plain, partly)), seconds)


def _points(costs: StepCosts, plain: set[int], partly: set[int]) -> Iterator[Point]:
    base, kept, level = costs.base + costs.excess, 0, 0
    for event in costs.events:
        peak = event.peak
        if event.call in plain:
            call = costs.calls[event.call]
            if event.kind == "forward":
                peak = max(peak, level + call.rise)
            elif event.kind == "again":  # there is none
                peak = level
        elif event.call in partly:
            call = costs.calls[event.call]
            if event.kind == "forward":
                peak = max(peak, level + call.parts_rise)
            elif event.kind == "again":
                peak = level + call.parts_again
        yield Point(event.where, base + kept + peak, kept)
        level = event.level
        if event.call in plain:
            kept += {"forward": 1, "before again": -1}.get(event.kind, 0) * call.kept
        elif event.call in partly:
            parts = costs.calls[event.call].parts_kept
            kept += {"forward": 1, "again": -1}.get(event.kind, 0) * parts


Merge = Callable[[str, Sequence[Any]], Any]
"""``merge(name, values)``: one value out of those that several costs have in the field `name`."""


def combined(several: Sequence[Any], merge: Merge, name: str = "") -> Any:
    """Costs of the same structure as one: each number or text in them is merged."""
    first = several[0]
    if isinstance(first, (StepCosts, CallCost, Event)):
        parts = {
            field.name: [getattr(own, field.name) for own in several] for field in fields(first)
        }
        return replace(first, **{key: combined(own, merge, key) for key, own in parts.items()})
    if isinstance(first, dict):
        return {key: combined([own[key] for own in several], merge, name) for key in first}
    if isinstance(first, tuple):
        return tuple(combined(own, merge, name) for own in zip(*several, strict=True))
    return merge(name, several)


def have_same_calls(several: Sequence[StepCosts]) -> bool:
    """Whether the steps consist of the same calls and events."""
    described = [
        (
            [call.unit for call in step_costs.calls],
            [(event.kind, event.call) for event in step_costs.events],
        )
        for step_costs in several
    ]
    return all(other == described[0] for other in described)


def maximum(everywhere: Sequence[StepCosts]) -> StepCosts:
    """The largest of the ranks' figures, one by one.

    Raises:
        PlanError: The ranks' steps consist of different calls.
    """
    if not have_same_calls(everywhere):
        raise PlanError(
            "the steps of the ranks consist of different calls, so that no plan fits them all; "
            "build the model in the same way, and give batches of the same structure, on every rank"
        )
    largest = {"base", "kept", "rise", "peak", "level", "seconds", "recomputed_seconds"}
    largest |= {"parts_kept", "parts_rise", "parts_again", "parts_seconds"}
    return combined(  # type: ignore[no-any-return]
        everywhere, lambda name, values: max(values) if name in largest else values[0]
    )
