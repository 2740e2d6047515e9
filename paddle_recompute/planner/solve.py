"""`solve`: the fastest choices whose peak is within a budget; `smallest`: what needs least.

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

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paddle_recompute.planner.costs import PLAIN, WHOLE, Gradients, StepCosts
from paddle_recompute.planner.policies import uniform
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
SAME = 1 - 1e-9
"""Sums of the same seconds in another order differ in their last bits."""


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

    @classmethod
    def uniform(cls, costs: StepCosts, option: str) -> Solution:
        """The same option for all calls."""
        choices = uniform(costs, option)
        return cls(choices, simulate(costs, choices))

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
    plain = Solution.uniform(costs, PLAIN)
    if plain.peak <= budget:  # nothing is faster, and something may seem to be as fast
        return plain
    groups, is_chain = _groups(costs)

    def within(limit: int) -> Solution | None:
        choices: list[Choice] = []
        for group in groups:
            spans = group.fastest(limit - costs.base - costs.excess)
            if spans is None:
                return None
            choices += (span.of_pass(order) for order in group.passes for span in spans)
        choices.sort(key=lambda choice: choice.first)
        return Solution(tuple(choices), simulate(costs, choices), is_chain)

    best = within(budget)
    if best is None or best.peak <= budget:
        return best
    low, high, found = costs.base, budget, None
    while high - low > 1024:
        middle = (low + high) // 2
        tried = within(middle)
        if tried is not None and tried.peak > budget:
            high = middle
        else:  # None: not even the labels stay within so little
            low, found = middle, tried or found
    return None if found is None else replace(found, exact=False)


def smallest(costs: StepCosts) -> Solution:
    """The choices with the smallest peak, found by bisection of the budget."""
    uniforms = [Solution.uniform(costs, option) for option in (WHOLE, PLAIN)]
    best = min(uniforms, key=lambda one: one.peak)
    return _least(costs, costs.base, best, np.inf)


def next_faster(costs: StepCosts, seconds: float, budget: int) -> Solution | None:
    """The solution of the smallest budget above `budget` that takes less than `seconds`.

    None: nothing is faster. Between `budget` and its peak no choice of the options lies, so bytes
    of a budget below it cannot be used.
    """
    plain = Solution.uniform(costs, PLAIN)
    if plain.seconds >= seconds * SAME:
        return None
    return _least(costs, budget, plain, seconds * SAME)


def _least(costs: StepCosts, low: int, best: Solution, seconds: float) -> Solution:
    """The solution with the least peak above `low` that takes less than `seconds`, as `best`."""
    high, close = best.peak, max(1, (best.peak - costs.base) // 4096)
    while high - low > close:
        middle = (low + high) // 2
        found = solve(costs, middle)
        if found is None or found.seconds >= seconds:
            low = middle
        else:
            best, high = found, min(found.peak, middle)
    return best


# ------------------------------------------------------------------------------------ a chain


@dataclass(frozen=True)
class _Span:
    """Calls from `first` to `last` (places in the order of a pass) under one option.

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

    def of_pass(self, order: tuple[int, ...]) -> Choice:
        """The choice for the calls with these numbers."""
        return Choice(order[self.first], order[self.last], self.option)


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
    """

    costs: StepCosts
    order: tuple[int, ...]
    passes: list[tuple[int, ...]]
    forward: list[int]
    before_forward: list[int]
    backward: list[int]
    before_backward: list[int]

    def fastest(self, room: int) -> list[_Span] | None:
        """The spans within `room` bytes, in order; None if that is too little.

        Labels of a boundary are the columns of an array: bytes, which rise, and seconds, which
        fall; the number of the span that ends there, and of the label before that span.
        """
        ending: list[list[_Span]] = [[] for _ in self.order]
        for span in self._spans(room):
            ending[span.last].append(span)
        frontier: list[NDArray[np.float64]] = [np.zeros((4, 1))]
        for spans in ending:
            found = [np.zeros((4, 0))]
            for number, span in enumerate(spans):
                kept, seconds = frontier[span.first][:2]
                count = int(kept.searchsorted(room - span.reach, side="right"))
                kept, seconds = kept[:count] + span.kept, seconds[:count] + span.seconds
                found.append(np.array([kept, seconds, np.full(count, number), np.arange(count)]))
            frontier.append(_pareto_minimal(np.concatenate(found, axis=1)))
        if not frontier[-1].size:
            return None
        chosen: list[_Span] = []
        index, place = -1, len(ending)  # the last label is the fastest
        while place:
            number, index = frontier[place][2:, index].astype(int)
            chosen.append(ending[place - 1][number])
            place = chosen[-1].first
        return chosen[::-1]

    def _spans(self, room: int) -> Iterator[_Span]:
        calls = self.costs.calls
        for first, number in enumerate(self.order):
            options = calls[number].options
            for option in options:
                yield from self._spans_from(first, option, room)
            # A segment gives up more than it keeps where inputs of its calls are large.
            least = min(
                kept_bytes(calls, number, one) - given_up_bytes(calls, number, one)
                for one in options.values()
            )
            room -= min(0, least)

    def _spans_from(self, first: int, option: str, room: int) -> Iterator[_Span]:
        """One call and, if it is recomputed, segments, where each call continues the one before.

        Segments that need more than `room`, with what earlier calls may give up, are left out.
        """
        calls, start = self.costs.calls, self.order[first]
        kept, seconds = 0, 0.0
        ahead = 0  # the peaks of the forwards
        again = 0  # what the calls before the last one keep when the segment has run again
        second = 0  # the peak of their second forwards, above the level of the backward
        inner = 0  # the peaks of their backwards
        for last, number in enumerate(self.order[first:], first):
            is_alone = last == first
            if not is_alone:
                before = self.order[last - 1]
                if calls[number].follows != before or number != before + 1:
                    return
                plain = calls[before].options[PLAIN]
                peak = again + plain.backward_peak - freed_again(calls, before, JOINED, start)
                second = max(second, again + plain.forward_peak)
                again += repeated_bytes(calls, before, start)
                inner = max(
                    inner,
                    self.backward[last - 1] + peak,
                    self.before_backward[last - 1] + again,
                )
            own = calls[number].options[option]
            ahead = max(
                ahead,
                self.before_forward[last] + kept,
                self.forward[last] + kept + own.forward_peak,
            )
            kept += kept_bytes(calls, number, own)
            if not is_alone:
                kept -= given_up_bytes(calls, number, own)
            seconds += own.seconds
            if max(ahead, inner) > room and not is_alone:
                return  # a longer one reaches higher
            together = option if is_alone else JOINED
            peak = again + own.backward_peak - freed_again(calls, number, together, start)
            reach = max(
                ahead,
                inner,
                self.backward[last] + max(second, peak),
                self.before_backward[last] + kept,
            )
            if is_alone or reach <= room:
                yield _Span(first, last, together, reach, kept, seconds)
            if option != WHOLE:
                return


def _pareto_minimal(labels: NDArray[np.float64]) -> NDArray[np.float64]:
    labels = labels[:, np.argsort(labels[0], kind="stable")]  # merges runs
    seconds = labels[1]
    is_better = np.ones(len(seconds), bool)
    is_better[1:] = seconds[1:] < np.minimum.accumulate(seconds)[:-1] * SAME
    labels = labels[:, is_better]
    last = labels.shape[1] - 1
    if last >= MOST_LABELS:
        labels = labels[:, np.linspace(0, last, MOST_LABELS).round().astype(int)]
    return labels


def _groups(costs: StepCosts) -> tuple[list[_Group], bool]:
    """The passes, and whether the backwards of each are in the reverse order of the forwards."""
    forwards: dict[int, list[int]] = defaultdict(list)
    backwards: dict[int, list[int]] = defaultdict(list)
    levels: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    present = Gradients(costs)
    for event in costs.events:
        if event.kind not in ("forward", "backward"):
            continue
        number, call = event.call, costs.calls[event.call]
        here = [event.enter + present.bytes, event.before + present.bytes]
        if event.kind == "forward":
            forwards[call.pass_number].append(number)
            levels[number][:2] = here
        else:
            backwards[call.pass_number].append(number)
            levels[number][2:] = here[0] - call.output_bytes, here[1]
            present.add(number)
    is_chain = True
    passes: dict[tuple[str, ...], list[tuple[int, ...]]] = defaultdict(list)
    for pass_number, ahead in forwards.items():
        back = backwards[pass_number]
        # Nobody asks for the gradients of those without a backward.
        order = (*(one for one in ahead if one not in back), *reversed(back))
        is_chain &= list(order) == ahead
        passes[tuple(costs.calls[one].name for one in order)].append(order)

    def plain_bytes(order: tuple[int, ...]) -> int:
        return sum(costs.calls[one].options[PLAIN].kept for one in order)

    groups = []
    for orders in passes.values():
        highest = np.max([[levels[one] for one in order] for order in orders], axis=0)
        groups.append(_Group(costs, max(orders, key=plain_bytes), orders, *highest.T.tolist()))
    return groups, is_chain
