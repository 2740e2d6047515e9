"""One call of a block, measured alone: what it keeps, how high it reaches, how long it takes.

Its input comes out of an operator and its output goes into one, as in the step: so the engine owns
the gradients as it does there, and every byte is where it would be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import paddle

from paddle_recompute import _nested, _paddle
from paddle_recompute._paddle import memory
from paddle_recompute.errors import PlanError
from paddle_recompute.planner.clock import now
from paddle_recompute.planner.costs import PLAIN, WHOLE, OptionCost
from paddle_recompute.planner.skeleton import HostTensor, RecordedCall
from paddle_recompute.recompute import (
    PartOption,
    Unit,
    offers_its_output,
    parts_of_block,
    treat_calls,
    treat_parts,
    undo_recompute,
)

PART_OPTIONS: tuple[PartOption, ...] = (
    "activation",
    "selective",
    "attention",
    "selective+attention",
)
OPTIONS = (PLAIN, *PART_OPTIONS, WHOLE)
MOST_ROUNDS = 9
"""A round runs a call under each option once. The bytes of the last and the least time count."""


def parts_of_options(block: paddle.nn.Layer) -> dict[PartOption, tuple[str, ...]]:
    """The parts that each partial option of `block` recomputes; options that differ, no others."""
    found: dict[PartOption, tuple[str, ...]] = {}
    for option in PART_OPTIONS:
        names = parts_of_block(block, option)
        if names and names not in found.values():
            found[option] = names
    return found


def measure_call(
    model: paddle.nn.Layer,
    call: RecordedCall,
    options: Sequence[str] = OPTIONS,
    *,
    rounds: int = 1,
    preserve_rng_state: bool = True,
) -> tuple[dict[str, OptionCost], dict[str, int]]:
    """The costs of `call` under each of `options`, and the gradients of its parameters.

    Returns:
        Costs by option; bytes of the gradient by name of the parameter in its block.
    """
    block = dict(model.named_sublayers(include_self=True))[call.layer]
    partial = parts_of_options(block)
    wanted = [one for one in options if one in (PLAIN, WHOLE) or one in partial]
    before = {p.name: p.grad for p in block.parameters() if p.grad is not None}
    if before:
        raise PlanError(
            f"'{call.layer}' has gradients; measure between two steps, after clear_gradient"
        )
    runs: dict[str, list[OptionCost]] = {option: [] for option in wanted}
    gradients: dict[str, int] = {}
    parts = {str(option): names for option, names in partial.items()}
    # The first forward of a block is slower than the next ones: this one is not timed.
    freed = {PLAIN: _freed_input(block, call)}
    for _ in range(rounds):  # in turn: what slows the machine down slows all options
        for option in wanted:
            with _under(block, option, parts.get(option, ()), preserve_rng_state):
                runs[option].append(_run(block, call, gradients))
    for option in parts:
        # A part keeps no less of the input than its operators do.
        if freed[PLAIN] and option in wanted:
            with _under(block, option, parts[option], preserve_rng_state):
                freed[option] = _freed_input(block, call)
    plain = min(run.seconds for run in runs[PLAIN])
    return {
        option: replace(
            found[-1],
            # Nothing is faster for being run twice.
            seconds=max(plain, min(run.seconds for run in found)),
            forward_seconds=min(run.forward_seconds for run in found),
            takes_offers=option != PLAIN,
            frees_input=freed.get(option, 0),
        )
        for option, found in runs.items()
    }, gradients


@contextlib.contextmanager
def _under(
    block: paddle.nn.Layer, option: str, parts: Sequence[str], preserve_rng_state: bool
) -> Iterator[None]:
    """Inside, `block` is treated as `option` says."""
    try:
        if option == WHOLE:
            # The name of a model within itself is "".
            treat_calls(block, [Unit(("",), (0,))], {"": 1}, preserve_rng_state=preserve_rng_state)
        elif option != PLAIN:
            treat_parts(block, parts, preserve_rng_state=preserve_rng_state)
        yield
    finally:
        undo_recompute(block)


def _freed_input(block: paddle.nn.Layer, call: RecordedCall) -> int:
    """Bytes that go when nobody but `block` holds its input after the forward."""
    with paddle.set_grad_enabled(True):
        args, kwargs = _inputs(call)
        with _paddle.amp_state_of(call.amp):
            outputs = block(*args, **kwargs)
        before = memory.current_bytes()
        del args, kwargs
        freed = before - memory.current_bytes()
        del outputs
    return freed


def _inputs(call: RecordedCall) -> Any:
    """(args, kwargs): tensors that come out of an operator where they need gradients."""
    anchor = paddle.zeros([1])
    anchor.stop_gradient = False

    def give(leaf: Any) -> Any:
        if not isinstance(leaf, HostTensor):
            return leaf
        tensor = leaf.load()
        if leaf.stop_gradient or not tensor.is_floating_point():
            return tensor
        return tensor + anchor.astype(tensor.dtype)

    return _nested.map_leaves(give, call.inputs)


def _run(block: paddle.nn.Layer, call: RecordedCall, gradients: dict[str, int]) -> OptionCost:
    with paddle.set_grad_enabled(True):
        args, kwargs = _inputs(call)
        given = {one.data_ptr() for one in _nested.tensors_in((args, kwargs))}
        before = memory.current_bytes()
        memory.reset_peak()
        began = now()
        with _paddle.amp_state_of(call.amp):
            outputs = block(*args, **kwargs)
        forwarded = now()
        forward_peak = memory.peak_bytes() - before
        after = memory.current_bytes() - before
        fresh = {
            one.data_ptr(): one.size * one.element_size()
            for one in _nested.tensors_in(outputs)
            if _paddle.is_initialized(one) and one.data_ptr() not in given
        }
        output_bytes = sum(fresh.values())
        offers = any(offers_its_output(one) for one in _nested.tensors_in(outputs))
        ends = [
            one.sum()
            for one in _nested.tensors_in(outputs)
            if not one.stop_gradient and one.is_floating_point()
        ]
        if not ends:
            raise PlanError(f"no output of '{call.layer}' needs a gradient; it has no backward")
        del outputs
        held = memory.current_bytes() - before
        small = sum(one.size * one.element_size() for one in ends)
        memory.reset_peak()
        continued = now()
        paddle.autograd.backward(ends)
        ended = now()
        backward_peak = memory.peak_bytes() - before - small
    for name, parameter in block.named_parameters():
        if parameter.grad is not None:
            gradients[name] = int(parameter.grad.size * parameter.grad.element_size())
            parameter.clear_gradient(False)
    return OptionCost(
        kept=after - output_bytes,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        seconds=forwarded - began + ended - continued,
        forward_seconds=forwarded - began,
        keeps_output=bool(output_bytes) and held - small >= after,
        offers_output=offers,
    )
