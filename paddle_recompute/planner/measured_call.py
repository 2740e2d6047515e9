"""One call of a block, measured alone: what it keeps, how high it reaches, how long it takes.

Its input comes out of an operator and its output goes into one, as in the step: so the engine owns
the gradients as it does there, and every byte is where it would be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle import memory
from paddle_recompute._paddle.amp import amp_state_of
from paddle_recompute._paddle.layers import is_initialized
from paddle_recompute.errors import PlanError
from paddle_recompute.planner.clock import now
from paddle_recompute.planner.costs import OFFLOADED, PLAIN, WHOLE, OptionCost, held_for_repetition
from paddle_recompute.planner.in_program import MeasureCall, costs_in_program
from paddle_recompute.planner.skeleton import HostTensor, RecordedCall
from paddle_recompute.recompute import (
    Offload,
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
OPTIONS = (PLAIN, *PART_OPTIONS, WHOLE, OFFLOADED)
MORE_BALLAST = 2**20
"""Bytes: scalars and views, of which a Program may have more than dygraph."""


def parts_of_options(block: paddle.nn.Layer) -> dict[PartOption, tuple[str, ...]]:
    """The parts that each partial option of `block` recomputes; options that differ, no others."""
    found: dict[PartOption, tuple[str, ...]] = {}
    for option in PART_OPTIONS:
        names = parts_of_block(block, option)
        if names and names not in found.values():
            found[option] = names
    return found


class MeasuredCall:
    """The costs of one call under each option, from one round or more.

    Args:
        model: The model of the call.
        call: As the skeleton has recorded it.
        options: Those that are measured, without those that the block does not have.
        preserve_rng_state: As in `recompute`.
        keeps_gradients: Whether the gradients of parameters are there before the backward.
        offload: Where the inputs of the option `OFFLOADED` wait; None: there is no such option.

    Attributes:
        gradients: Bytes of the gradients that a backward makes, by name in the block.
        frees_inputs: Bytes of each input that go when nobody but the block holds it after the
            forward, by option and by where it is among the inputs.
        rounds: How often each option was run.
        spent: Seconds of the last round.

    Raises:
        PlanError: The block has gradients.
    """

    def __init__(
        self,
        model: paddle.nn.Layer,
        call: RecordedCall,
        options: Sequence[str] = OPTIONS,
        *,
        preserve_rng_state: bool = True,
        keeps_gradients: bool = False,
        offload: Offload | None = None,
    ) -> None:
        self._keeps_gradients = keeps_gradients
        self._offload = offload
        self._block = dict(model.named_sublayers(include_self=True))[call.layer]
        self._call = call
        self._preserve_rng_state = preserve_rng_state
        self._parts: dict[str, tuple[str, ...]] = {PLAIN: (), WHOLE: ()}
        self._parts |= {str(name): parts for name, parts in parts_of_options(self._block).items()}
        if offload is not None:
            self._parts[OFFLOADED] = ()
        if any(p.grad is not None for p in self._block.parameters()):
            raise PlanError(
                f"'{call.layer}' has gradients; measure between two steps, after clear_gradient"
            )
        self._runs: dict[str, list[OptionCost]] = {
            option: [] for option in options if option in self._parts
        }
        self._in_program: Mapping[str, tuple[float, int, int]] = {}
        self.gradients: dict[str, int] = {}
        self.frees_inputs: dict[str, dict[str, int]] = {}
        self.rounds, self.spent = 0, 0.0

    @property
    def plain_seconds(self) -> float:
        """The least time of the plain call."""
        return min(run.seconds for run in self._runs[PLAIN])

    def round(self) -> None:
        """Run the call once under each option, in turn: what slows one down slows all of them."""
        began = now()
        if self._keeps_gradients and not self.rounds:
            _run(self._block, self._call)
        if not self.rounds:
            # The first forward of a block is slower than the next ones: this one is not timed.
            self.frees_inputs = {PLAIN: _freed_inputs(self._block, self._call)}
        for option in list(self._runs):
            plain = self._runs[PLAIN][0] if self._parts[option] else None
            with self._under(option):
                found = _run(self._block, self._call, useless_beside=plain)
            self._note_gradients()
            if found is None:
                del self._runs[option]
                continue
            self._runs[option].append(found)
            # A part keeps no less of the input than its operators do; the whole keeps all of it.
            frees = any(self.frees_inputs[PLAIN].values()) or option == OFFLOADED
            if frees and not self.rounds and option not in (PLAIN, WHOLE):
                with self._under(option):
                    self.frees_inputs[option] = _freed_inputs(self._block, self._call)
        self.rounds += 1
        self.spent = now() - began

    def measure_in_program(self, measure_call: MeasureCall) -> None:
        """From now on the costs are those in a Program."""

        def load(leaf: Any) -> Any:
            if not isinstance(leaf, HostTensor):
                return leaf
            tensor = leaf.load()
            tensor.stop_gradient = leaf.stop_gradient
            return tensor

        args_and_kwargs = _nested.map_leaves(load, self._call.inputs)
        treatments = {option: partial(self._treat, option=option) for option in self._runs}
        highest = max(
            max(run.forward_peak, run.backward_peak) for runs in self._runs.values() for run in runs
        )
        self._in_program = measure_call(
            self._call.layer, args_and_kwargs, treatments, 2 * highest + MORE_BALLAST
        )

    def costs(self) -> dict[str, OptionCost]:
        """By option: the bytes of the last round, the least time of all."""
        seconds = self._seconds()
        costs = {
            option: replace(
                runs[-1],
                seconds=seconds[option],
                forward_seconds=min(run.forward_seconds for run in runs),
                takes_offers=option != PLAIN,
            )
            for option, runs in self._runs.items()
        }
        # What a part computes again goes as soon as the operator has it.
        for option in {WHOLE, OFFLOADED} & costs.keys():
            again = held_for_repetition(costs[option], costs[PLAIN])
            costs[option] = replace(costs[option], repeated=again)
        if self._in_program:
            return costs_in_program(costs, self._in_program, self._freed_in_program())
        if self._offload == "host" and OFFLOADED in costs:
            # While a block is recomputed, the input of the one before it comes back to the device.
            coming = sum(self.frees_inputs[OFFLOADED].values())
            peak = costs[OFFLOADED].backward_peak + coming
            costs[OFFLOADED] = replace(costs[OFFLOADED], backward_peak=peak)
        return costs

    def _freed_in_program(self) -> dict[str, int]:
        """By option, bytes of inputs that go; a `MeasureCall` holds those that need no gradient."""
        leaves = dict(_nested.named_leaves(self._call.inputs))
        return {
            option: sum(size for path, size in sizes.items() if not leaves[path].stop_gradient)
            for option, sizes in self.frees_inputs.items()
        }

    def _seconds(self) -> dict[str, float]:
        found = {option: min(run.seconds for run in runs) for option, runs in self._runs.items()}
        # Nothing is faster for being run twice, or for a copy.
        found = {option: max(found[PLAIN], seconds) for option, seconds in found.items()}
        if OFFLOADED in found:
            found[OFFLOADED] = max(found[OFFLOADED], found.get(WHOLE, 0.0))
        return found

    def _note_gradients(self) -> None:
        for name, parameter in self._block.named_parameters():
            if parameter.grad is not None:
                self.gradients[name] = int(parameter.grad.size * parameter.grad.element_size())
                if not self._keeps_gradients:
                    parameter.clear_gradient(False)

    @contextlib.contextmanager
    def _under(self, option: str) -> Iterator[None]:
        """Inside, the block is treated as `option` says."""
        try:
            self._treat(self._block, option)
            yield
        finally:
            undo_recompute(self._block)

    def _treat(self, block: paddle.nn.Layer, option: str) -> None:
        if option in (WHOLE, OFFLOADED):
            # The name of a model within itself is "".
            unit = Unit(("",), (0,), offload=self._offload if option == OFFLOADED else None)
            treat_calls(block, [unit], {"": 1}, preserve_rng_state=self._preserve_rng_state)
        elif option != PLAIN:
            treat_parts(block, self._parts[option], preserve_rng_state=self._preserve_rng_state)


def _freed_inputs(block: paddle.nn.Layer, call: RecordedCall) -> dict[str, int]:
    """Bytes of each input that go when nobody but `block` holds it after the forward."""
    with paddle.set_grad_enabled(True):
        args, kwargs = _inputs(call)
        with amp_state_of(call.amp), call.replayed():
            outputs = block(*args, **kwargs)
        leaves = [
            (path, leaf)
            for path, leaf in _nested.named_leaves((args, kwargs))
            if _nested.is_tensor(leaf)
        ]
        del args, kwargs
        freed = {}
        while leaves:
            before = memory.current_bytes()
            path, leaf = leaves.pop()
            del leaf
            freed[path] = before - memory.current_bytes()
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


def _run(
    block: paddle.nn.Layer,
    call: RecordedCall,
    *,
    useless_beside: OptionCost | None = None,
) -> OptionCost | None:
    """One forward and backward; None if it keeps no less than the plain call, and offers nothing.

    Then it has no backward: some activations are kept by others anyway.
    """
    with paddle.set_grad_enabled(True):
        args, kwargs = _inputs(call)
        given = {one.data_ptr() for one in _nested.tensors_in((args, kwargs))}
        before = memory.current_bytes()
        memory.reset_peak()
        began = now()
        with amp_state_of(call.amp), call.replayed():
            outputs = block(*args, **kwargs)
        forwarded = now()
        forward_peak = memory.peak_bytes() - before
        after = memory.current_bytes() - before
        fresh = {
            one.data_ptr(): one.size * one.element_size()
            for one in _nested.tensors_in(outputs)
            if is_initialized(one) and one.data_ptr() not in given
        }
        output_bytes = sum(fresh.values())
        offers = any(offers_its_output(one) for one in _nested.tensors_in(outputs))
        kept = after - output_bytes
        if useless_beside is not None and kept >= useless_beside.kept and not offers:
            return None
        ends = [
            one.sum()
            for one in _nested.tensors_in(outputs)
            if not one.stop_gradient and one.is_floating_point()
        ]
        del outputs
        held = memory.current_bytes() - before
        small = sum(one.size * one.element_size() for one in ends)
        memory.reset_peak()
        continued = now()
        if ends:  # a block that hands on an input without a gradient has no backward
            paddle.autograd.backward(ends)
        ended = now()
        backward_peak = memory.peak_bytes() - before - small
    return OptionCost(
        kept=kept,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        seconds=forwarded - began + ended - continued,
        forward_seconds=forwarded - began,
        keeps_output=bool(output_bytes) and held - small >= after,
        offers_output=offers,
    )
