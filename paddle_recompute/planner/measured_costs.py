"""`measure_costs`: the costs of a step, from real steps whose blocks are recomputed.

In the first step every call is recomputed, which takes about the least memory that the step can
take. The second forward of a call shows what the call keeps if it is plain, and how long its
recompute takes. In a few more steps one call of each kind is plain. They show what the call keeps
in its place, where other operators may hold its output or its input as well.

A step may contain collectives. So the ranks run equally many steps, and the same calls are plain in
each.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import paddle

from paddle_recompute._paddle import memory
from paddle_recompute.comparison import StepState
from paddle_recompute.distributed import is_distributed, values_of_ranks
from paddle_recompute.errors import DependencyError, PlanError
from paddle_recompute.planner.clock import now
from paddle_recompute.planner.costs import (
    CallCost,
    Event,
    StepCosts,
    Units,
    keeping,
    maximum,
    simulate,
)
from paddle_recompute.planner.job import Job
from paddle_recompute.planner.signatures import structure_of
from paddle_recompute.recompute import (
    first_wrapped_part,
    keep_parts,
    kept_parts,
    observed,
    undo_recompute,
    wrap_calls,
)

SECONDS_OF_REPEATS = 0.25
"""A step is repeated for its time until it has run so long, or `MOST_RUNS` times."""
MOST_RUNS = 5
MOST_PLAIN = 2
"""A measured step holds the activations of at most so many calls more than the recomputed step."""
Progress = Callable[[int, int], None]
"""Called with (done, total): the kinds of calls whose costs are known."""


def measure_costs(job: Job, *, progress: Progress | None = None) -> StepCosts:
    """Measure the step of `job`; parameters, buffers, gradients and random streams stay the same.

    On several ranks, all of them call it. Costs about 4 to 6 plain steps; short steps are repeated.

    Args:
        job: The step.
        progress: Called as kinds of calls are done.

    Raises:
        PlanError: The model is wrapped already, has gradients, or calls none of its blocks; the
            recomputed step does not fit the device; or the ranks' steps consist of different calls.
        DependencyError: This Paddle cannot reset the peak.
    """
    check_measurable(job)
    gc.collect()  # cycles that are collected meanwhile spoil the levels
    held = job.held()
    base = memory.current_bytes() + sum(held.values()) - job.present(held)
    with untouched(job):
        blocks = [(name, 0) for name in job.blocks]  # every call of each
        of_calls = dict.fromkeys(job.blocks, 1)

        def everything() -> None:
            wrap_calls(job.model, blocks, of_calls, preserve_rng_state=job.preserve_rng_state)

        try:
            costs = run_recorded(job, everything)
            if job.keeps_gradients:  # they exist from the second step on
                costs = run_recorded(job, everything)
        except MemoryError as error:
            raise PlanError(
                "the step does not fit the device although every block is recomputed "
                f"({str(error).strip().splitlines()[0]}): give a smaller batch (find_batch_size "
                "finds the largest one), or name smaller parts as checkpoints"
            ) from error
        if not costs.calls:
            raise PlanError(
                "the step calls none of the blocks: " + ", ".join(list(job.blocks)[:3]) + "; name "
                "Layers that loss_fn calls, with gradients enabled"
            )
        costs = _with_costs_in_place(job, costs, everything, progress)
        if job.keep:
            costs = _with_costs_of_parts(job, costs, everything)
        gradients = sum(_bytes(p.grad) for p in job.parameters() if p.grad is not None)
    there = {"gradients": gradients} if job.keeps_gradients else {}
    end = costs.events[-1]
    clipped = gradients if job.clips else 0
    update = Event("update", -1, end.level + clipped, end.level, "update")
    return replace(
        costs,
        base=base + sum(there.values()),
        held={**held, **there},
        events=(*costs.events, update),
    )


def check_measurable(job: Job) -> None:
    """Check that the step of `job` can be measured on this device.

    Raises:
        PlanError: Its model is wrapped already, or has gradients.
        DependencyError: This Paddle cannot reset the peak.
    """
    if not memory.can_reset_peak():
        raise DependencyError(
            "this Paddle cannot reset the peak of memory on "
            f"'{paddle.get_device()}', so the calls of a step cannot be measured one by one; use "
            "Paddle 3, or load a plan that was made there"
        )
    if (wrapped := first_wrapped_part(job.model)) is not None:
        raise PlanError(
            f"'{wrapped}' is recomputed already; plan a model that is not, or call "
            "RecomputePlan.remove or unwrap() first"
        )
    named = next((p.name for p in job.parameters() if p.grad is not None), None)
    if named is not None:
        raise PlanError(
            f"the parameter '{named}' has a gradient; plan between two steps, after "
            "optimizer.clear_grad(set_to_zero=False)"
        )


@contextlib.contextmanager
def untouched(job: Job) -> Iterator[None]:
    """Restores attributes, buffers and random streams at its end, and drops all gradients."""
    state = StepState(job.model)
    try:
        yield
    finally:
        undo_recompute(job.model)
        job.clear_gradients()
        state.restore()


def treat_units(
    model: paddle.nn.Layer,
    costs: StepCosts,
    whole: Units,
    *,
    preserve_rng_state: bool = True,
    keep: Sequence[str] = (),
) -> None:
    """Recompute the units of `whole` and no others of the calls of `costs`; `keep` parts of those
    that do.

    Raises:
        SelectionError: A pattern of `keep` matches nothing inside of the blocks.
    """
    in_order = sorted(costs.calls, key=lambda call: call.number)
    turns = {call.layer: call.number + 1 for call in in_order}
    wrap_calls(model, whole, turns, preserve_rng_state=preserve_rng_state)
    if any(len(choice) > 2 for choice in whole):
        keep_parts(model, keep, turns)


def run_recorded(job: Job, treat: Callable[[], None]) -> StepCosts:
    """Run the step and record its events, with bytes above its start.

    Args:
        job: The step.
        treat: Wraps the calls that are recomputed.
    """
    recorder, blocks = _Recorder(), job.blocks
    treat()
    try:
        with observed(blocks, recorder):
            recorder.begin()
            job.step()
            recorder.event("end", -1)
    finally:
        undo_recompute(job.model)
    if not job.keeps_gradients:
        job.clear_gradients()
    return recorder.costs()


def _with_costs_in_place(
    job: Job,
    costs: StepCosts,
    everything: Callable[[], None],
    progress: Progress | None,
) -> StepCosts:
    """`costs` with the bytes and seconds that were measured of plain calls in their place.

    Args:
        job: The step.
        costs: Of the step with every call recomputed.
        everything: Wraps every call.
        progress: As in `measure_costs`.
    """
    # The largest figures of all ranks choose the plain calls: the same ones on every rank.
    agreed = _largest_of_ranks(costs)
    kinds = _kinds(job, agreed)
    # What follows the last call is the loss, whose step shows nothing of that call.
    waiting = {n[len(n) // 2]: n for n in kinds if agreed.calls[n[0]].kept > 0}
    calls = list(costs.calls)
    done, least = 0, costs.recomputed_seconds
    while waiting:
        tried = _calls_of_one_step(agreed, waiting)
        plain = {costs.calls[number].unit for number in tried}
        whole = tuple(unit for unit in costs.units if unit not in plain)
        try:
            runs = _paired_runs(job, costs, whole, everything)
        except MemoryError:
            if is_distributed():  # the other ranks wait in a collective of this step
                raise
            job.clear_gradients()
            break  # what the second forwards took is near enough to be verified
        kept = _kept(costs, runs[0][1], tried)
        for number in tried:
            seconds = _seconds_saved(costs, runs, number)
            for other in waiting.pop(number):
                calls[other] = replace(
                    calls[other], kept=kept.get(number, calls[other].kept), seconds=seconds
                )
        least = min(least, *(run.recomputed_seconds for run, _ in runs))
        done += len(tried)
        if progress is not None:
            progress(done, done + len(waiting))
    return replace(costs, calls=tuple(calls), recomputed_seconds=least)


def _with_costs_of_parts(job: Job, costs: StepCosts, everything: Callable[[], None]) -> StepCosts:
    """`costs` with what a step showed in which every call keeps the parts of ``job.keep``."""
    try:
        runs = _paired_runs(job, costs, keeping(costs.units), everything)
    except MemoryError as error:
        raise PlanError(
            "the step does not fit the device if every block keeps the parts of keep: give fewer "
            f"patterns ({', '.join(job.keep)}), or a smaller batch"
        ) from error
    calls = list(costs.calls)
    parts = kept_parts(job.model, job.keep, job.blocks)
    numbers = {
        number
        for number, call in enumerate(calls)
        if any(part.startswith(f"{call.layer}.") for part in parts)
    }
    steps = (itertools.pairwise(run.events) for run in (costs, runs[0][1]))
    for (was, plain), (before, event) in zip(*steps, strict=True):
        if event.call not in numbers:
            continue
        call, rise = calls[event.call], event.peak - before.level
        if event.kind == "forward" and event.call in costs.with_backward:
            kept = event.level - before.level - (plain.level - was.level)
            calls[event.call] = replace(call, parts_rise=rise, parts_kept=kept)
        elif event.kind == "again":
            calls[event.call] = replace(call, parts_again=rise)
    for number in costs.with_backward & numbers:
        seconds = _seconds_saved(costs, runs, number)
        calls[number] = replace(calls[number], parts_seconds=seconds)
    return replace(costs, calls=tuple(calls))


def _largest_of_ranks(costs: StepCosts) -> StepCosts:
    if not is_distributed():
        return costs
    everywhere = values_of_ranks(costs.to_dict(), "the costs of a step")
    return maximum([StepCosts.from_dict(of_rank) for of_rank in everywhere])


def _kinds(job: Job, costs: StepCosts) -> list[list[int]]:
    """The numbers of the calls that cost the same; one of them is measured for all."""
    structures = {name: structure_of(block) for name, block in job.blocks.items()}
    kinds: dict[Any, list[int]] = defaultdict(list)
    passes = set()
    for number, call in enumerate(costs.calls):
        is_first = call.pass_number not in passes  # its input is the batch's, and stays
        passes.add(call.pass_number)
        kinds[structures[call.layer], call.kept, call.rise, is_first].append(number)
    return list(kinds.values())


def _calls_of_one_step(costs: StepCosts, waiting: Collection[int]) -> list[int]:
    """Those of `waiting` that may be plain in one step: no neighbours, within `MOST_PLAIN` calls.

    The backward of a call ends where its neighbour's second forward begins. Two plain neighbours
    would be two unknowns of one equation.
    """
    backwards = [event.call for event in costs.events if event.kind == "before again"]
    places = {number: index for index, number in enumerate(backwards)}
    most = simulate(costs, costs.units).peak.bytes
    most += MOST_PLAIN * max(call.kept for call in costs.calls)
    tried: list[int] = []
    for call_number in waiting:
        plain = {costs.calls[other].unit for other in [*tried, call_number]}
        is_beside = any(abs(places[call_number] - places[other]) == 1 for other in tried)
        is_within = simulate(costs, set(costs.units) - plain).peak.bytes <= most
        if not tried or (is_within and not is_beside):
            tried.append(call_number)
    return tried


def _paired_runs(
    job: Job,
    costs: StepCosts,
    whole: Units,
    everything: Callable[[], None],
) -> list[tuple[StepCosts, StepCosts]]:
    """The step with every call recomputed and the one that recomputes `whole`, in turns."""
    options: Any = {"preserve_rng_state": job.preserve_rng_state, "keep": job.keep}
    treat = partial(treat_units, job.model, costs, whole, **options)
    began = now()
    runs = [(costs, run_recorded(job, treat))]
    first, second = ([call.layer for call in run.calls] for run in runs[0])
    if first != second:
        raise PlanError(
            "two steps with the same batch call different blocks, so a plan of one does not hold "
            "for the next: let every step make the same calls (no LayerDrop)"
        )
    if is_distributed():  # the ranks' clocks differ
        return runs
    while len(runs) < MOST_RUNS and now() - began < SECONDS_OF_REPEATS:
        runs.append((run_recorded(job, everything), run_recorded(job, treat)))
    return runs


def _seconds_saved(
    costs: StepCosts, runs: Sequence[tuple[StepCosts, StepCosts]], number: int
) -> float:
    """By how many seconds a call is faster in the second steps of `runs` than in the first."""
    slow, fast = (
        min(_seconds_around(costs, run, number) for run in several)
        for several in zip(*runs, strict=True)
    )
    return max(0.0, slow - fast)


def _seconds_around(costs: StepCosts, found: StepCosts, number: int) -> float:
    """Seconds of a call's first forward, and of its second forward and backward.

    The latter end where the next call of the backward begins again.

    Args:
        costs: Of the step whose calls `found` has.
        found: The step whose times are read.
        number: The call.
    """
    keys = [(event.kind, event.call) for event in costs.events]
    times = {(event.kind, event.call): event.time for event in found.events}
    place = keys.index(("before again", number))
    forward = times["forward", number] - times["before forward", number]
    return forward + times[keys[place + 2]] - times[keys[place - 1]]


def _kept(costs: StepCosts, found: StepCosts, tried: Sequence[int]) -> dict[int, int]:
    """What the calls `tried` keep, which are plain in the step `found`.

    It is seen in the backward, right before another call runs again: nothing but the graph is left.
    """
    units = {costs.calls[number].unit for number in tried}
    plain = {number for number in costs.with_backward if costs.calls[number].unit in units}
    levels = {(event.kind, event.call): event.level for event in found.events}
    alive: set[int] = set()
    seen: dict[int, tuple[int, set[int]]] = {}
    for event in costs.events:
        if event.kind == "forward" and event.call in plain:
            alive.add(event.call)
        elif event.kind == "before again":
            if event.call not in plain:
                more = levels.get((event.kind, event.call), event.level) - event.level
                seen |= {number: (more, alive - {number}) for number in alive}
            alive.discard(event.call)
    kept: dict[tuple[str, int], int] = {}
    for _ in tried:  # those of one equation are solved with those of another
        for number in set(tried) & seen.keys():
            more, others = seen[number]
            known = [kept.get(costs.calls[other].unit) for other in others]
            if None not in known:
                kept[costs.calls[number].unit] = more - sum(filter(None, known))
    return {n: kept[costs.calls[n].unit] for n in tried if costs.calls[n].unit in kept}


class _Recorder:
    """Notes what happens in a step: `begin` starts it."""

    def __init__(self) -> None:
        self._calls: list[CallCost] = []
        self._events: list[Event] = []
        self._numbers: dict[str, int] = {}
        self._pass, self._waiting, self._start, self._began = -1, 0, 0, 0.0
        self._current: int | None = None
        """The call whose first forward runs."""
        self._places: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def begin(self) -> None:
        self._start, self._began = memory.current_bytes(), now()
        memory.reset_peak()

    def costs(self) -> StepCosts:
        calls, events = tuple(self._calls), tuple(self._events)
        return StepCosts(0, {}, calls, events, now() - self._began)

    def event(self, kind: Any, call: int) -> int:
        """Note what ends here; returns the level."""
        level, peak = memory.current_bytes() - self._start, memory.peak_bytes() - self._start
        where = self._where(kind, call)
        self._events.append(Event(kind, call, peak, level, where, now() - self._began))
        memory.reset_peak()
        return level

    def _where(self, kind: str, call: int) -> str:
        last = self._events[-1] if self._events else None
        if kind not in ("forward", "again") and last is not None and last.kind == "again":
            return f"backward of {self._calls[last.call].name}"
        if call < 0:
            return "end of the backward"
        return f"{kind.replace('again', 'second forward')} of {self._calls[call].name}"

    def forward(self, name: str, run: Callable[[], Any]) -> Any:
        """The first forward of a call of the block `name`."""
        if self._current is not None:  # a block within a block
            return run()
        if not self._waiting:
            self._pass += 1
            self._numbers.clear()
        self._waiting += 1
        number = self._numbers[name] = self._numbers.get(name, -1) + 1
        self._current = place = len(self._calls)
        self._calls.append(CallCost(name, number, self._pass))
        self.event("before forward", place)
        try:
            return run()
        finally:
            self.event("forward", place)
            self._current = None

    def recorded(self, frame: Any) -> None:
        """The frame of the call whose first forward runs."""
        if self._current is not None:
            self._places[frame] = self._current
            weakref.finalize(frame, self._gone)

    def _gone(self) -> None:
        self._waiting -= 1

    def second_forward(self, frame: Any, run: Callable[[], None]) -> None:
        """The second forward of a call."""
        place = self._places.get(frame)
        if place is None:
            return run()
        before, began = self.event("before again", place), now()
        run()
        seconds, rise = now() - began, memory.peak_bytes() - self._start - before
        kept = self.event("again", place) - before
        call = self._calls[place]
        self._calls[place] = replace(call, kept=kept, rise=rise, seconds=seconds)
        return None


def _bytes(tensor: paddle.Tensor) -> int:
    return int(tensor.size * tensor.element_size())
