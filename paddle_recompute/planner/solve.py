"""`solve`: the fastest choices whose peak is within a budget.

The calls of a pass are taken in the reverse order of their backwards. At the backward of a call
exactly what the calls before it keep is there, so all that earlier choices mean to later ones is
one number of bytes. A label is such a number with the seconds it costs. Labels that another one
beats in both are dropped, and nothing is rounded: the best of all choices is found, where a budget
of bytes is given as it is (no slots).

The spans are: one call with one of its measured options, and a segment that is recomputed together
(`JOINED`).

Where the backward is not the reverse of the forward (two towers that take turns), what is there
during a *forward* is not what the labels say. `solve` then lets `simulate` judge, and lowers the
budget of the labels until the simulated peak is inside.

References:
    Chen et al. 2016, arXiv:1604.06174: segments. Beaumont et al. 2019, hal-02352969 (rotor): a
    chain of calls with measured sizes and times; gradients and communication buckets are not in its
    model and are in ours. Zhao et al. 2023, arXiv:2307.01236 (Rockmate): several options for each
    block. Jain et al. 2020, arXiv:1910.02653 (Checkmate): the same as a linear program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paddle_recompute.planner.costs import PLAIN, WHOLE, Gradients, StepCosts
from paddle_recompute.planner.simulate import (
    JOINED,
    Choice,
    Timeline,
    freed_again,
    given_up_bytes,
    kept_bytes,
    repeated_bytes,
    simulate,
)

MOST_LABELS = 2000
"""Labels of one boundary; of more than these, equally spaced ones are kept."""
FEW_LABELS = 48
"""Labels of one boundary in a first look, which gives a bound of the seconds."""


@dataclass(frozen=True)
class Solution:
    """Choices for all calls, and what they come to.

    Attributes:
        choices: They cover the calls in order.
        timeline: The simulated step.
        exact: Whether no other choices of these options are faster within the budget; otherwise
            `simulate` judged the choices of a chain.
    """

    choices: tuple[Choice, ...]
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


def solve(costs: StepCosts, budget: int) -> Solution | None:
    """The fastest choices with a simulated peak of at most `budget` bytes; None if there are none.

    Args:
        costs: Of the step.
        budget: In bytes, parameters and moments included.
    """
    plain = tuple(Choice(number, number, PLAIN) for number in range(len(costs.calls)))
    timeline = simulate(costs, plain)
    if timeline.peak.bytes <= budget:  # nothing is faster, and something may seem to be as fast
        return Solution(plain, timeline)
    groups = _groups(costs)
    exact = all(group.is_chain for group in groups)

    def within(limit: int) -> Solution | None:
        found: dict[int, Choice] = {}
        for group in groups:
            of_group = _solve_group(group, limit - costs.base - costs.excess)
            if of_group is None:
                return None
            found.update(of_group)
        choices = tuple(found[first] for first in sorted(found))
        return Solution(choices, simulate(costs, choices), exact)

    best = within(budget)
    if best is None or best.peak <= budget:
        return best
    low, high, found = costs.base, budget, None
    for _ in range(32):
        if high - low <= 1024:
            break
        middle = (low + high) // 2
        tried = within(middle)
        if tried is not None and tried.peak > budget:
            high = middle
        else:  # None: not even the labels stay within so little
            low, found = middle, tried or found
    return None if found is None else replace(found, exact=False)


# ------------------------------------------------------------------------------------ a chain


@dataclass(frozen=True)
class _Group:
    """Passes of the same calls, of which the largest stands for all.

    Arrays are over the calls of the pass in the reverse order of their backwards.

    Attributes:
        order: Numbers of the calls.
        passes: For every pass, the numbers of its calls in the same order.
        forward: Level at the begin of each forward.
        before_forward: Peak before it.
        backward: Level at the begin of each backward without the gradient of the output, and with
            the gradients of parameters that exist by then.
        before_backward: Peak before it, with these gradients.
        is_chain: Whether the backwards are in the reverse order of the forwards.
    """

    costs: StepCosts
    order: tuple[int, ...]
    passes: tuple[tuple[int, ...], ...]
    forward: NDArray[np.int64]
    before_forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    before_backward: NDArray[np.int64]
    is_chain: bool


def _groups(costs: StepCosts) -> list[_Group]:
    backwards: dict[int, list[int]] = {}
    forwards: dict[int, list[int]] = {}
    for event in costs.events:
        if event.kind in ("forward", "backward"):
            number = costs.calls[event.call].pass_number
            (forwards if event.kind == "forward" else backwards).setdefault(number, []).append(
                event.call
            )
    levels = _levels(costs)
    by_calls: dict[tuple[tuple[str, int], ...], list[tuple[tuple[int, ...], bool]]] = {}
    for number, ahead in forwards.items():
        back = backwards.get(number, [])
        silent = [call for call in ahead if call not in back]  # nobody asks for their gradients
        order = (*silent, *reversed(back))
        key = tuple((costs.calls[call].layer, costs.calls[call].number) for call in order)
        by_calls.setdefault(key, []).append((order, list(order) == ahead))
    groups = []
    for members in by_calls.values():
        passes = [order for order, _ in members]
        plain = [sum(costs.calls[c].options[PLAIN].kept for c in order) for order in passes]
        largest = passes[int(np.argmax(plain))]
        highest = np.max([[levels[call] for call in order] for order in passes], axis=0)
        ahead, before_ahead, back, before_back = np.ascontiguousarray(highest.T, np.int64)
        is_chain = all(chain for _, chain in members)
        groups.append(
            _Group(costs, largest, tuple(passes), ahead, before_ahead, back, before_back, is_chain)
        )
    return groups


def _levels(costs: StepCosts) -> dict[int, tuple[int, int, int, int]]:
    """For each call: the levels of its forward and backward, and the peaks before them."""
    ahead: dict[int, tuple[int, int]] = {}
    back: dict[int, tuple[int, int]] = {}
    present = Gradients(costs)
    for event in costs.events:
        gradients = present.bytes
        if event.kind == "forward":
            ahead[event.call] = event.enter + gradients, event.before + gradients
        elif event.kind == "backward":
            call = costs.calls[event.call]
            level = event.enter - call.output_bytes + gradients
            back[event.call] = level, event.before + gradients
            present.add(event.call)
    nothing = (0, 0)
    return {
        call: (*ahead.get(call, nothing), *back.get(call, nothing))
        for call in range(len(costs.calls))
    }


@dataclass(frozen=True)
class _Span:
    """Calls from `first` to `last` (places in the order) under one option.

    Attributes:
        reach: Highest level that the span leads to, above what earlier calls keep.
        kept: What it adds to that until its backward.
        seconds: Its seconds.
    """

    first: int
    last: int
    option: str
    reach: int
    kept: int
    seconds: float


def _solve_group(group: _Group, room: int) -> dict[int, Choice] | None:
    """The choices by the number of their first call; None if the budget is too small."""
    ending: list[list[_Span]] = [_single_spans(group, place) for place in range(len(group.order))]
    for span in _segment_spans(group, room):
        ending[span.last].append(span)
    # A few labels give a bound, which then leaves few of all.
    fast = _best(group, room, ending, FEW_LABELS, np.inf)
    bound = np.inf if fast is None else fast[1] * (1 + 1e-9)
    best = _best(group, room, ending, MOST_LABELS, bound) or fast
    return None if best is None else best[0]


def _best(
    group: _Group, room: int, ending: list[list[_Span]], most: int, most_seconds: float
) -> tuple[dict[int, Choice], float] | None:
    """The choices and seconds of the best label at the end."""
    size = len(group.order)
    least = [min(u.seconds for u in spans if u.first == u.last) for spans in ending]
    left = [*np.cumsum(least[::-1])[::-1], 0.0]
    frontier = [_Labels.start()]
    for place in range(size):
        candidates = []
        for span in ending[place]:
            earlier = frontier[span.first]
            first, last = earlier.within(
                room - span.reach, most_seconds - span.seconds - left[place + 1]
            )
            if first < last:
                candidates.append(_Extended(span, earlier, first, last))
        frontier.append(_Labels.joined(candidates, most))
    end = frontier[size]
    if not len(end.kept):
        return None
    index = int(np.argmin(end.seconds))
    chosen: dict[int, Choice] = {}
    place = size
    while place:
        labels_here = frontier[place]
        span = labels_here.spans[labels_here.by[index]]
        for calls in group.passes:
            numbers = calls[span.first : span.last + 1]
            chosen[numbers[0]] = Choice(numbers[0], numbers[-1], span.option)
        index = int(labels_here.index[index])
        place = span.first
    return chosen, float(end.seconds.min())


@dataclass(frozen=True)
class _Labels:
    """Pareto-minimal (bytes, seconds) of one boundary, and where each came from.

    Attributes:
        kept: Bytes that the calls before the boundary keep; they rise from label to label.
        seconds: Seconds of these calls; they fall.
        by: For each label, the place in `spans` of the span that ends at the boundary.
        index: For each label, the label at the boundary before that span.
        spans: The spans that end at the boundary.
    """

    kept: NDArray[np.int64]
    seconds: NDArray[np.float64]
    by: NDArray[np.int64]
    index: NDArray[np.int64]
    spans: list[_Span]

    @classmethod
    def start(cls) -> _Labels:
        one = np.zeros(1, np.int64)
        return cls(one, np.zeros(1), one, one, [])

    def within(self, most_kept: int, most_seconds: float) -> tuple[int, int]:
        """The range of labels with at most so many bytes and seconds."""
        last = int(self.kept.searchsorted(most_kept, side="right"))
        return int((-self.seconds).searchsorted(-most_seconds)), last

    @classmethod
    def joined(cls, candidates: list[_Extended], most: int) -> _Labels:
        if not candidates:
            none = np.zeros(0, np.int64)
            return cls(none, np.zeros(0), none, none, [])
        kept = np.concatenate([c.earlier.kept[c.first : c.last] + c.span.kept for c in candidates])
        seconds = np.concatenate(
            [c.earlier.seconds[c.first : c.last] + c.span.seconds for c in candidates]
        )
        order = np.argsort(kept, kind="stable")  # merges runs, which the candidates are
        best = np.minimum.accumulate(seconds[order])
        better = np.empty(len(order), bool)
        better[0] = True
        # Sums of the same numbers in another order differ in their last bits.
        better[1:] = seconds[order][1:] < best[:-1] * (1 - 1e-9)
        left = order[better]
        of_equal_bytes = kept[left]
        left = left[np.append(of_equal_bytes[1:] != of_equal_bytes[:-1], True)]
        if len(left) > most:
            left = left[np.linspace(0, len(left) - 1, most).round().astype(np.int64)]
        starts = np.cumsum([0, *(c.last - c.first for c in candidates)])
        by = starts.searchsorted(left, side="right") - 1
        return cls(
            kept[left],
            seconds[left],
            by,
            left - starts[by] + np.array([c.first for c in candidates])[by],
            [c.span for c in candidates],
        )


@dataclass(frozen=True)
class _Extended:
    """Labels `first` to `last` of an earlier boundary, with `span` after them."""

    span: _Span
    earlier: _Labels
    first: int
    last: int


def _single_spans(group: _Group, place: int) -> list[_Span]:
    number, calls = group.order[place], group.costs.calls
    found = []
    for option, cost in calls[number].options.items():
        kept = kept_bytes(calls, number, cost)
        freed = freed_again(calls, number, option, number)
        reach = max(
            group.before_forward[place],
            group.forward[place] + cost.forward_peak,
            group.backward[place] + cost.backward_peak - freed,
            group.before_backward[place] + kept,
        )
        found.append(_Span(place, place, option, int(reach), kept, cost.seconds))
    return _undominated(found)


def _undominated(spans: list[_Span]) -> list[_Span]:
    """Without options that another one beats in everything."""
    return [
        span
        for span in spans
        if not any(
            other is not span
            and other.reach <= span.reach
            and other.kept <= span.kept
            and other.seconds <= span.seconds
            and (other.option == PLAIN or other.seconds < span.seconds)
            for other in spans
        )
    ]


def _segment_spans(group: _Group, room: int) -> list[_Span]:
    """Segments of at least two calls, each of which continues the one before it."""
    every, order = group.costs.calls, group.order
    calls = [every[number] for number in order]
    found = []
    for first, start in enumerate(calls):
        if WHOLE not in start.options:
            continue
        number, own_first = order[first], start.options[WHOLE]
        kept, seconds = kept_bytes(every, number, own_first), own_first.seconds
        ahead = 0  # the peaks of the forwards after the first
        again = 0  # what the calls before keep when the segment has run again
        highest_again = 0  # the peak of their second forwards, above the level of the backward
        inner = 0  # the peaks of their backwards
        ahead_first = group.forward[first] + own_first.forward_peak
        for place in range(first + 1, len(calls)):
            before, call = calls[place - 1], calls[place]
            continues = (
                call.follows == order[place - 1]
                and order[place] == order[place - 1] + 1
                and WHOLE in call.options
            )
            if not continues:
                break
            plain, own = before.options[PLAIN], call.options[WHOLE]
            keeps = repeated_bytes(every, order[place - 1], number)
            freed = freed_again(every, order[place - 1], JOINED, number)
            inner = max(
                inner,
                group.backward[place - 1] + again + plain.backward_peak - freed,
                group.before_backward[place - 1] + again + keeps,
            )
            highest_again = max(highest_again, again + plain.forward_peak)
            again += keeps
            ahead = max(
                ahead,
                group.before_forward[place] + kept,
                group.forward[place] + kept + own.forward_peak,
            )
            kept += kept_bytes(every, order[place], own)
            kept -= given_up_bytes(every, order[place], own)
            seconds += own.seconds
            freed = freed_again(every, order[place], JOINED, number)
            back = group.backward[place] + max(highest_again, again + own.backward_peak - freed)
            if max(ahead, inner) > room:
                break  # a longer one reaches higher
            reach = max(
                group.before_forward[first],
                ahead_first,
                back,
                inner,
                ahead,
                group.before_backward[place] + kept,
            )
            if reach <= room:
                found.append(_Span(first, place, JOINED, int(reach), kept, seconds))
    return found
