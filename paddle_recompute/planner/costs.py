"""What was measured of a step: bytes and seconds, as plain data that JSON can hold.

A step is a sequence of events: a call of a block begins and ends (`Forward`), its backward begins
and ends (`Backward`), the step ends. Between them runs everything else (embedding, head, loss).
All levels are bytes above the start of the step, measured on a *skeleton* of it: every call keeps
its input and nothing else. What the calls keep in truth, and how high they reach, is measured
apart (`OptionCost`), and `simulate` puts the two together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from paddle_recompute.errors import PlanError

PLAIN = "plain"
WHOLE = "whole"
BYTES = ("before", "enter", "kept", "forward_peak", "backward_peak", "repeated")
"""Fields of `Event` and `OptionCost` that more rows, or another rank, may raise."""


@dataclass(frozen=True)
class OptionCost:
    """One call of a block under one option; bytes above the level before the call.

    Attributes:
        kept: Bytes from the end of the forward to the backward, beyond input and output.
        forward_peak: Most bytes during the forward, the output included.
        backward_peak: Most bytes during the backward, with the gradients of output, input and
            parameters and, if it is recomputed, with all that is computed again.
        seconds: Of forward and backward.
        keeps_output: Whether the call itself keeps its output until its backward.
        frees_input: Bytes of its inputs that it does not keep, because it keeps a copy of them.
        repeated: Bytes that are computed again and held in its backward, between its operators.
    """

    kept: int
    forward_peak: int
    backward_peak: int
    seconds: float
    keeps_output: bool = False
    frees_input: int = 0
    repeated: int = 0


@dataclass(frozen=True)
class CallCost:
    """One call of a block in a step.

    Attributes:
        layer: Its name in the model.
        number: Which call of this Layer in its pass it is, from 0.
        pass_number: The pass that it is of: all forwards and backwards until no forward waits for
            its backward any more. A step has one pass, or one for each chunk of a gradient cache.
        input_bytes: Inputs that nothing but this call would keep.
        output_bytes: Its outputs.
        output_is_kept: Whether something other than the call keeps its output, under all options:
            a later call whose input it is, or an operator between the blocks.
        follows: The call before it whose output is its input; None if there is none.
        gradients: Bytes of the gradient of each of its parameters, by name.
        options: The costs of each option.
    """

    layer: str
    number: int
    pass_number: int
    input_bytes: int
    output_bytes: int
    output_is_kept: bool
    follows: int | None
    gradients: dict[str, int]
    options: dict[str, OptionCost]

    @property
    def name(self) -> str:
        """``encoder.layers.3``, or ``encoder.layers.3#2`` for its second call."""
        return f"{self.layer}#{self.number + 1}" if self.number else self.layer


@dataclass(frozen=True)
class Event:
    """Something that happens in a step.

    Attributes:
        kind: ``forward`` or ``backward`` of a call, that its backward is ``done`` or the graph over
            it was ``dropped``; ``update`` of the optimizer, or ``end``.
        call: Number of the call; -1 for ``update`` and ``end``.
        before: The peak since the event before.
        enter: The level at its begin.
        seconds: Time since the event before.
    """

    kind: Literal["forward", "backward", "done", "dropped", "update", "end"]
    call: int
    before: int
    enter: int
    seconds: float = 0.0


@dataclass(frozen=True)
class StepCosts:
    """Everything that was measured of a step.

    Attributes:
        base: Bytes held at the start of each step: the parts of `held`, and what else there is.
        held: The parts of `base` that are known: parameters, moments, masters, batch.
        calls: The calls of blocks, in the order of their forwards.
        events: What happens in a step, in order.
        excess: Bytes that a verified step took beyond its prediction.
        keeps_gradients: Whether `base` has the gradients, to which each backward adds.
        ranks: Over how many ranks optimizer state and parameters could be spread.
        state: Bytes of moments and masters on a rank: ``"replicated"``, and ``"sharded"`` over
            `ranks` (`ShardedOptimizer`), where the largest share counts.
    """

    base: int
    held: dict[str, int]
    calls: tuple[CallCost, ...]
    events: tuple[Event, ...]
    excess: int = 0
    keeps_gradients: bool = False
    ranks: int = 1
    state: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of a plain step."""
        return self.glue_seconds + sum(call.options[PLAIN].seconds for call in self.calls)

    @property
    def glue_seconds(self) -> float:
        """Of all that is outside of blocks."""
        return sum(event.seconds for event in self.events)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepCosts:
        """The inverse of `to_dict`."""
        calls = tuple(
            CallCost(
                **{
                    **call,
                    "options": {name: OptionCost(**cost) for name, cost in call["options"].items()},
                }
            )
            for call in data["calls"]
        )
        events = tuple(Event(**event) for event in data["events"])
        return cls(**{**data, "calls": calls, "events": events})


class Gradients:
    """The gradients of parameters of blocks that are there beyond the base of a step.

    Where gradients stay from step to step, these are sums that the engine still adds to: it hands a
    parameter the sum over all calls of a pass.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._present: dict[str, int] = {}
        self._uses = Counter((c.pass_number, name) for c in costs.calls for name in c.gradients)

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return sum(self._present.values())

    def add(self, number: int) -> None:
        """The backward of a call is over."""
        call = self._costs.calls[number]
        for name, size in call.gradients.items():
            self._uses[call.pass_number, name] -= 1
            self._present[name] = size
            if self._costs.keeps_gradients and not self._uses[call.pass_number, name]:
                del self._present[name]


Merge = Callable[[str, Sequence[Any]], Any]
"""``merge(name, values)``: one value out of those that several costs have in the field `name`."""


def combined(several: Sequence[Any], merge: Merge, name: str = "") -> Any:
    """Costs of the same structure as one: each number, text or None in them is merged.

    Args:
        several: `StepCosts`, or parts of them. What not all of them have, such as an option, is
            left out.
        merge: For each value.
        name: Of the field that they are from.
    """
    first = several[0]
    if isinstance(first, (StepCosts, CallCost, OptionCost, Event)):
        parts = {one.name: [getattr(own, one.name) for own in several] for one in fields(first)}
        return replace(first, **{key: combined(own, merge, key) for key, own in parts.items()})
    if isinstance(first, dict):
        common = [key for key in first if all(key in own for own in several)]
        return {key: combined([own[key] for own in several], merge, name) for key in common}
    if isinstance(first, tuple):
        return tuple(combined(own, merge, name) for own in zip(*several, strict=True))
    return merge(name, several)


def have_same_calls(several: Sequence[StepCosts]) -> bool:
    """Whether the steps consist of the same calls and events."""
    described = [
        (
            [(call.layer, call.number) for call in one.calls],
            [(event.kind, event.call) for event in one.events],
        )
        for one in several
    ]
    return all(one == described[0] for one in described)


def maximum(everywhere: Sequence[StepCosts]) -> StepCosts:
    """The largest of the ranks' figures, one by one.

    Raises:
        PlanError: The ranks' steps consist of different calls.
    """
    options = [[sorted(call.options) for call in one.calls] for one in everywhere]
    if not have_same_calls(everywhere) or any(one != options[0] for one in options):
        raise PlanError(
            "the steps of the ranks consist of different calls, so that no plan fits them all; "
            "build the model in the same way, and give batches of the same structure, on every rank"
        )

    def largest(name: str, values: Sequence[Any]) -> Any:
        if name == "frees_input":
            return min(values)
        has_largest = name in ("base", "seconds", *BYTES)
        return max(values) if has_largest else values[0]

    return combined(everywhere, largest)  # type: ignore[no-any-return]
