"""`measure_step`: the costs of a step, from its skeleton and a measurement of each kind of call."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle import memory
from paddle_recompute.errors import DependencyError, PlanError
from paddle_recompute.planner.clock import now
from paddle_recompute.planner.costs import PLAIN, CallCost, Event, StepCosts
from paddle_recompute.planner.measured_call import MeasuredCall
from paddle_recompute.planner.skeleton import Skeleton, run_skeleton
from paddle_recompute.recompute import is_treated
from paddle_recompute.replay import ModelState

if TYPE_CHECKING:
    from paddle_recompute.planner.job import Job

ALWAYS_AFFORDABLE = 0.25
"""Seconds that the measurement of the calls may take however short a step is."""
MOST_ROUNDS = 9
"""A round runs a call under each option once."""
Progress = Callable[[int, int], None]
"""Told (done, total) of the calls that are measured."""


def measure_step(
    job: Job, *, only_bytes: bool = False, progress: Progress | None = None
) -> StepCosts:
    """Measure the step of `job`; parameters, buffers, gradients and random streams stay the same.

    Args:
        job: The step.
        only_bytes: Nothing is repeated for its time.
        progress: Is told how far the measurement is.

    Raises:
        PlanError: The model is wrapped already, has gradients, or calls none of its blocks.
        DependencyError: This Paddle cannot start the peak anew.
    """
    check_measurable(job.model)
    parameters, blocks, keeps_gradients = job.parameters(), job.blocks, job.keeps_gradients
    named = next((p.name for p in parameters if p.grad is not None), None)
    if named is not None:
        raise PlanError(
            f"the parameter '{named}' has a gradient; plan between two steps, after "
            "optimizer.clear_grad(set_to_zero=False)"
        )
    gc.collect()  # cycles that are collected meanwhile spoil the levels
    held = job.held()
    base = memory.current_bytes() + sum(held.values()) - job.present(held)
    state = StepState(job.model)
    try:
        skeleton = run_skeleton(blocks, job.step)
        drops = not skeleton.has_dropped_too_much
        if not drops:
            clear_gradients(parameters)
            skeleton = run_skeleton(blocks, job.step, drops=False)
        if keeps_gradients:  # the parameters outside of blocks have them now
            skeleton = run_skeleton(blocks, job.step, drops=drops)
        _check_recorded(skeleton, blocks)
        gradients = {id(p): _bytes_of_gradient(p) for p in parameters if p.grad is not None}
        clear_gradients(parameters)
        kinds = _measured_kinds(job, skeleton, progress, for_times=not only_bytes)
    finally:
        clear_gradients(parameters)
        state.put_back()
    for call in skeleton.calls:
        of_block = kinds[call.signature].gradients
        own = blocks[call.layer].named_parameters()
        gradients |= {id(p): of_block[name] for name, p in own if name in of_block}
    size = sum(gradients.values())
    there = {"gradients": size} if keeps_gradients else {}
    costs = _composed(
        skeleton,
        kinds,
        base=base + sum(there.values()),
        held={**held, **there},
        update_bytes=size if job.clips else 0,
        in_batch={one.data_ptr() for one in _nested.tensors_in(job.batch)},
    )
    return replace(costs, keeps_gradients=keeps_gradients, ranks=job.ranks, state=job.state_bytes())


def check_measurable(model: paddle.nn.Layer) -> None:
    """Check that `model` can be measured on this device.

    Raises:
        PlanError: It is wrapped already.
        DependencyError: This Paddle cannot start the peak anew.
    """
    if not memory.can_reset_peak():
        raise DependencyError(
            "this Paddle cannot start the peak of memory anew on "
            f"'{paddle.get_device()}', so the calls of a step cannot be measured one by one; use "
            "Paddle 3, or load a plan that was made there"
        )
    wrapped = is_treated(model)
    if wrapped is not None:
        raise PlanError(
            f"'{wrapped}' is recomputed already; plan a model that is not, or call "
            "RecomputePlan.remove or unwrap() first"
        )


def _check_recorded(skeleton: Skeleton, blocks: Mapping[str, paddle.nn.Layer]) -> None:
    if skeleton.has_dropped_too_much:
        raise PlanError(
            "the step runs a backward a second time through operators beside its blocks "
            "(retain_graph=True); such a step cannot be planned"
        )
    if not skeleton.calls:
        raise PlanError(
            "the step calls none of the blocks: " + ", ".join(list(blocks)[:3]) + "; name "
            "Layers that loss_fn calls, with gradients enabled"
        )


def _measured_kinds(
    job: Job, skeleton: Skeleton, progress: Progress | None, *, for_times: bool
) -> dict[Any, MeasuredCall]:
    """The calls by signature, measured.

    One round gives the bytes. For the time there is a round for each call of the kind in a step,
    which takes less than three plain steps in all.
    """
    kinds: dict[Any, MeasuredCall] = {}
    counts = Counter(call.signature for call in skeleton.calls)
    began = now()
    for call in skeleton.calls:
        if call.inputs is not None:
            if progress is not None:
                progress(len(kinds), len(counts))
            kinds[call.signature] = kind = MeasuredCall(job, call)
            kind.round()
    if progress is not None:
        progress(len(kinds), len(counts))
    for number in range(1, MOST_ROUNDS if for_times else 1):
        for signature, kind in kinds.items():
            if number < counts[signature] or now() - began < ALWAYS_AFFORDABLE:
                kind.round()
    return kinds


def _composed(
    skeleton: Skeleton,
    measured: dict[Any, MeasuredCall],
    *,
    base: int,
    held: dict[str, int],
    update_bytes: int,
    in_batch: set[int],
) -> StepCosts:
    costs = {signature: kind.costs() for signature, kind in measured.items()}
    calls: list[CallCost] = []
    # An address is used again in the next pass.
    taken: dict[tuple[int, int], int] = {}
    uses = Counter(
        (call.pass_number, one) for call in skeleton.calls for one in call.input_pointers
    )
    for number, call in enumerate(skeleton.calls):
        inputs = {
            (call.pass_number, pointer): size for pointer, size in call.input_pointers.items()
        }
        for pointer in inputs:
            taken.setdefault(pointer, number)
        own = {
            pointer: size
            for pointer, size in inputs.items()
            if taken[pointer] == number
            and pointer not in skeleton.saved_outside
            and pointer[1] not in in_batch
        }
        kind = measured[call.signature]
        # An input of several calls stays for the others.
        alone = {pointer for (_, pointer) in own if uses[call.pass_number, pointer] == 1}
        freed = {
            path: size
            for path, size in kind.frees_inputs.items()
            if call.input_paths.get(path) in alone
        }
        calls.append(
            CallCost(
                call.layer,
                call.number,
                call.pass_number,
                sum(own.values()),
                call.output_bytes,
                call.output_pointers.keys() <= call.kept_outputs,
                max(call.made_by, default=None),
                {f"{call.layer}.{name}": size for name, size in kind.gradients.items()},
                {
                    option: replace(cost, frees_input=sum(freed.values()) if option == PLAIN else 0)
                    for option, cost in costs[call.signature].items()
                },
            )
        )
    # What a later call may free is kept by nobody for sure.
    may_go = {call.follows for call in calls if any(o.frees_input for o in call.options.values())}
    calls = [
        replace(call, output_is_kept=call.output_is_kept and number not in may_go)
        for number, call in enumerate(calls)
    ]
    end = skeleton.events[-1]
    update = Event("update", -1, end.enter + update_bytes, end.enter)
    events = (*skeleton.events, update)
    return StepCosts(base, held, tuple(calls), events)


class StepState:
    """What a step of `model` changes: attributes, buffers and their values, random streams."""

    def __init__(self, model: paddle.nn.Layer) -> None:
        self._state = ModelState(model)
        self._values = [
            (one, one.numpy().copy()) for one in self._state.buffers().values()
        ]  # on the host

    def put_back(self) -> None:
        """Restore it: the same tensors with the same values, wherever a forward has put others."""
        self._state.put_back()
        with paddle.no_grad():
            for buffer, values in self._values:
                buffer.set_value(values)


def _bytes_of_gradient(parameter: paddle.Tensor) -> int:
    return int(parameter.grad.size * parameter.grad.element_size())


def clear_gradients(parameters: Sequence[paddle.Tensor]) -> None:
    """Drop the gradients of `parameters`."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.clear_gradient(False)
