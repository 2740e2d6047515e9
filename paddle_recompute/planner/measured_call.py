"""One call of a block, measured alone: what it keeps, how high it reaches, how long it takes.

Its input comes out of an operator and its output goes into one, as in the step: so the engine owns
the gradients as it does there, and every byte is where it would be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle import memory
from paddle_recompute._paddle.amp import amp_state_of
from paddle_recompute._paddle.layers import is_initialized
from paddle_recompute.planner.clock import now
from paddle_recompute.planner.costs import PLAIN, WHOLE, OptionCost
from paddle_recompute.planner.skeleton import HostTensor, RecordedCall
from paddle_recompute.recompute import Unit, treat_calls, undo_recompute

if TYPE_CHECKING:
    from paddle_recompute.planner.job import Job


class MeasuredCall:
    """The costs of one call under each option, from one `round` or more.

    Args:
        job: Of the call; its block has no gradients.
        call: As the skeleton has recorded it.

    Attributes:
        gradients: Bytes of the gradients that a backward makes, by name in the block.
        frees_inputs: Bytes of each input that go when nobody but the plain block holds it after
            the forward, by where it is among the inputs.
    """

    def __init__(self, job: Job, call: RecordedCall) -> None:
        self._job, self._call = job, call
        self._block = dict(job.model.named_sublayers(include_self=True))[call.layer]
        self._runs: dict[str, list[OptionCost]] = {PLAIN: [], WHOLE: []}
        self.gradients: dict[str, int] = {}
        if job.keeps_gradients:  # they are there before the backwards that are measured
            _run(self._block, call)
        # The first forward of a block is slower than the next ones: this one is not timed.
        self.frees_inputs = _freed_inputs(self._block, call)
        self._note_gradients()

    def round(self) -> None:
        """Run the call once under each option, in turn: what slows one down slows all of them."""
        for option, runs in self._runs.items():
            with _under(option, self._block, preserve_rng_state=self._job.preserve_rng_state):
                runs.append(_run(self._block, self._call))
            self._note_gradients()

    def _note_gradients(self) -> None:
        for name, parameter in self._block.named_parameters():
            if parameter.grad is not None:
                self.gradients[name] = int(parameter.grad.size * parameter.grad.element_size())
                if not self._job.keeps_gradients:
                    parameter.clear_gradient(False)

    def costs(self) -> dict[str, OptionCost]:
        """By option: the bytes of the last round, the least time of all."""
        plain, whole = (
            replace(runs[-1], seconds=min(run.seconds for run in runs))
            for runs in self._runs.values()
        )
        # Beyond what the call has kept, and what the plain one takes in its backward.
        again = whole.backward_peak - whole.kept - (plain.backward_peak - plain.kept)
        # Nothing is faster for being run twice.
        seconds = max(plain.seconds, whole.seconds)
        return {PLAIN: plain, WHOLE: replace(whole, repeated=max(0, again), seconds=seconds)}


@contextlib.contextmanager
def _under(option: str, block: paddle.nn.Layer, *, preserve_rng_state: bool) -> Iterator[None]:
    """Inside, the block is treated as `option` says."""
    # The name of a model within itself is "".
    units = [] if option == PLAIN else [Unit(("",), (0,))]
    try:
        treat_calls(block, units, {"": 1}, preserve_rng_state=preserve_rng_state)
        yield
    finally:
        undo_recompute(block)


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
        # Paddle (2.6, 3.x) keeps a PyLayer that saved its own output for ever without a backward.
        _backward(_ends_of(outputs))
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


def _ends_of(outputs: Any) -> list[paddle.Tensor]:
    return [
        one.sum()
        for one in _nested.tensors_in(outputs)
        if not one.stop_gradient and one.is_floating_point()
    ]


def _backward(ends: list[paddle.Tensor]) -> None:
    if ends:  # a block that hands on an input without a gradient has no backward
        paddle.autograd.backward(ends)


def _run(block: paddle.nn.Layer, call: RecordedCall) -> OptionCost:
    """One forward and backward."""
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
        ends = _ends_of(outputs)
        del outputs
        held = memory.current_bytes() - before
        small = sum(one.size * one.element_size() for one in ends)
        memory.reset_peak()
        continued = now()
        _backward(ends)
        ended = now()
        backward_peak = memory.peak_bytes() - before - small
    return OptionCost(
        kept=after - output_bytes,
        forward_peak=forward_peak,
        backward_peak=backward_peak,
        seconds=forwarded - began + ended - continued,
        keeps_output=bool(output_bytes) and held - small >= after,
    )
