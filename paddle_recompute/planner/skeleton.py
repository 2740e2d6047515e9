"""A step without the insides of its blocks: what all else takes, and in which order things happen.

Every block runs under ``no_grad`` in its place and keeps its input. In the backward it hands on
gradients of the right shape without computing them. So the skeleton never needs the memory of the
plain step, and everything outside of the blocks (embedding, head, loss) is the real thing.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle import memory
from paddle_recompute._paddle.amp import AmpState, amp_state
from paddle_recompute._paddle.layers import is_initialized, is_parameter
from paddle_recompute._paddle.saved_tensors import look_of
from paddle_recompute.planner.clock import now
from paddle_recompute.planner.costs import Event
from paddle_recompute.planner.signatures import structure_of
from paddle_recompute.replay import Reach


@dataclass
class RecordedCall:
    """One call of a block as the skeleton saw it."""

    layer: str
    number: int
    pass_number: int
    signature: tuple[Any, ...]
    """Calls with equal signatures cost the same."""
    inputs: Any
    """(args, kwargs) with arrays of the host; None if an earlier call has this signature."""
    amp: AmpState
    reach: Reach | None
    """What opaque arguments, such as a cache of keys and values, held before the call."""
    input_pointers: dict[int, int]
    """Bytes by address."""
    input_paths: dict[str, int]
    """Address of each tensor among the inputs that is no view, by where it is in them."""
    output_pointers: dict[int, int]
    output_bytes: int
    made_by: frozenset[int]
    """Numbers of the calls whose outputs are among its inputs."""
    kept_outputs: set[int] = field(default_factory=set)
    """Addresses of outputs that a later call has as input, or that another operator saved."""

    def replayed(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the opaque arguments are as before the call."""
        return contextlib.nullcontext() if self.reach is None else self.reach.replayed()


class HostTensor:
    """The values of a tensor, which take none of the memory that is measured."""

    def __init__(self, tensor: paddle.Tensor) -> None:
        self._values = tensor.detach().numpy().copy()
        self._place = tensor.place
        self.stop_gradient = tensor.stop_gradient

    def load(self) -> paddle.Tensor:
        """The tensor, a leaf that needs no gradient."""
        return paddle.to_tensor(self._values, place=self._place)


@dataclass
class Skeleton:
    """What was recorded of a step.

    Attributes:
        start: Bytes held at its start.
        calls: The calls of blocks.
        events: What happened.
        saved_outside: Addresses of tensors that operators outside of blocks saved, with the pass in
            which they did: an address is used again in the next one.
        has_dropped_too_much: Whether a backward asked for a tensor that was dropped with the graph
            of blocks, or a second time.
    """

    start: int = 0
    calls: list[RecordedCall] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    saved_outside: set[tuple[int, int]] = field(default_factory=set)
    has_dropped_too_much: bool = False


def run_skeleton(
    blocks: Mapping[str, paddle.nn.Layer], step: Callable[[], object], *, drops: bool = True
) -> Skeleton:
    """Run `step`, a forward and a backward, without the insides of `blocks`.

    Args:
        blocks: By name.
        step: Its numbers are no gradients.
        drops: Whether what operators beside the blocks saved goes with a graph of blocks that is
            dropped without a backward. Paddle would forget it; but another graph may need it.
    """
    structures = {name: structure_of(block) for name, block in blocks.items()}
    recorder = _Recorder(structures, drops)
    with contextlib.ExitStack() as stack:
        for name, block in blocks.items():
            stack.enter_context(_replaced_forward(block, name, recorder))
        stack.enter_context(
            paddle.autograd.saved_tensors_hooks(recorder.pack, lambda saved: saved.take())
        )
        recorder.begin()
        step()
        recorder.event("end", -1)
    return recorder.skeleton


@contextlib.contextmanager
def _replaced_forward(block: paddle.nn.Layer, name: str, recorder: _Recorder) -> Iterator[None]:
    forward = block.forward

    def probe(*args: Any, **kwargs: Any) -> Any:
        if not paddle.is_grad_enabled() or recorder.inside:
            return forward(*args, **kwargs)
        return recorder.call(name, forward, (args, kwargs))

    block.forward = probe
    try:
        yield
    finally:
        del block.__dict__["forward"]


class _Recorder:
    def __init__(self, structures: Mapping[str, tuple[Any, ...]], drops: bool) -> None:
        self.skeleton = Skeleton()
        self.inside = False
        self._structures = structures
        self._numbers: dict[str, int] = {}
        self._pass = -1
        self._waiting = 0
        """Calls whose backward is still to come."""
        self._seen: set[tuple[Any, ...]] = set()
        self._drops = drops
        self._saved: list[_Saved] = []
        """Of operators outside of blocks, in this pass."""
        self._outputs: dict[int, int] = {}
        """The call that made the tensor at an address, as long as that tensor is there."""

    def begin(self) -> None:
        self.skeleton.start = memory.current_bytes()
        self.restart()

    def event(self, kind: Any, call: int) -> None:
        level, start = memory.current_bytes(), self.skeleton.start
        seconds = now() - self._since
        peak = memory.peak_bytes() - start
        self.skeleton.events.append(Event(kind, call, peak, level - start, seconds))
        self.restart()

    def restart(self) -> None:
        """What the event that was noted last stands for is over."""
        memory.reset_peak()
        self._since = now()

    def call(self, name: str, forward: Callable[..., Any], inputs: Any) -> Any:
        place = len(self.skeleton.calls)
        self.event("forward", place)
        holder = _Holder(self, place, forward, inputs, [])
        tensors = [
            tensor
            for tensor in _unique(_nested.tensors_in(inputs))
            if not tensor.stop_gradient and tensor.is_floating_point()
        ]
        holder.likenesses += [(tensor.shape, tensor.dtype) for tensor in tensors]
        anchor = paddle.zeros([1])
        anchor.stop_gradient = False
        given = {tensor.data_ptr() for tensor in _nested.tensors_in(inputs)}
        if self._waiting == 0:
            self._numbers.clear()
            self._saved = [saved for saved in self._saved if saved.is_waiting]
            self._pass += 1
        self._waiting += 1
        number = self._numbers.get(name, 0)
        self._numbers[name] = number + 1
        is_opaque = not all(map(_is_plain, (leaf for _, leaf in _nested.named_leaves(inputs))))
        reach = Reach(forward, inputs) if is_opaque else None
        self.inside = True
        memory.reset_peak()
        level = memory.current_bytes()
        try:
            done = functools.partial(self.event, "done", place)
            gated: Any = _Gate.apply(done, *tensors) if tensors else ()
            gated = gated if isinstance(gated, (tuple, list)) else [gated]
            passed = _Pass.apply(anchor, holder, *gated)
        finally:
            self.inside = False
        if reach is not None:
            reach.after_forward()
        # What its structure does not tell (a branch by the number of the block) the peak does.
        peak = memory.peak_bytes() - level
        likenesses = _likenesses(inputs)
        signature = (self._structures[name], repr(amp_state()), likenesses, peak)
        on_host = None
        if signature not in self._seen:
            self._seen.add(signature)
            on_host = _nested.map_tensors(
                lambda one: one if is_parameter(one) else HostTensor(one), inputs
            )
        holder.forward = None
        weakref.finalize(holder, self._dropped, place)
        passed = passed if isinstance(passed, (tuple, list)) else (passed,)
        outputs, holder.outputs = _nested.put_in(holder.outputs, passed), None
        own_inputs, pointers = _pointers(inputs), _pointers(outputs)
        made_by = {self._outputs[one] for one in own_inputs if one in self._outputs}
        for pointer in own_inputs:
            self._is_kept(pointer)
        fresh = {pointer: size for pointer, size in pointers.items() if pointer not in given}
        self.skeleton.calls.append(
            RecordedCall(
                name,
                number,
                self._pass,
                signature,
                on_host,
                amp_state(),
                reach,
                own_inputs,
                {
                    path: leaf.data_ptr()
                    for path, leaf in _nested.named_leaves(inputs)
                    if _nested.is_tensor(leaf) and _owns_its_memory(leaf)
                },
                fresh,
                sum(fresh.values()),
                frozenset(made_by),
            )
        )
        for tensor in _nested.tensors_in(outputs):
            if tensor.data_ptr() in fresh:
                self._outputs[tensor.data_ptr()] = place
                weakref.finalize(tensor, self._forget, tensor.data_ptr(), place)
        self.restart()
        return outputs

    def has_begun_backward(self) -> None:
        self._waiting -= 1
        self.restart()

    def _is_kept(self, pointer: int) -> None:
        made_by = self._outputs.get(pointer)
        if made_by is not None:
            self.skeleton.calls[made_by].kept_outputs.add(pointer)

    def _forget(self, pointer: int, place: int) -> None:
        """Another tensor may have the address from now on."""
        if self._outputs.get(pointer) == place:
            del self._outputs[pointer]

    def _dropped(self, place: int) -> None:
        """The graph over a call is gone; it may have been dropped without a backward."""
        done = {one.call for one in self.skeleton.events if one.kind in ("backward", "end")}
        if place not in done and -1 not in done:
            self.event("dropped", place)
            self._waiting -= 1
            if self._waiting == 0 and self._drops:
                for saved in self._saved:
                    saved.drop()

    def pack(self, tensor: paddle.Tensor) -> _Saved:
        if not self.inside and is_initialized(tensor):
            self._is_kept(tensor.data_ptr())
            is_before_the_next = self._waiting == 0
            self.skeleton.saved_outside.add((self._pass + is_before_the_next, tensor.data_ptr()))
        self._saved.append(_Saved(tensor, self.skeleton))
        return self._saved[-1]


class _Saved:
    """A tensor that the graph saved; Paddle forgets to drop it with its operator.

    Without the tensor's graph, which Paddle would forget to drop with it.
    """

    def __init__(self, tensor: paddle.Tensor, skeleton: Skeleton) -> None:
        self._tensor: paddle.Tensor | None = tensor.detach()
        self._likeness = tensor.shape, tensor.dtype
        self._skeleton = skeleton

    @property
    def is_waiting(self) -> bool:
        return self._tensor is not None

    def take(self) -> paddle.Tensor:
        tensor, self._tensor = self._tensor, None
        if tensor is None:  # an error would leave the engine as another one
            self._skeleton.has_dropped_too_much = True
            return paddle.zeros(*self._likeness)
        return tensor

    def drop(self) -> None:
        self._tensor = None


class _Gate(paddle.autograd.PyLayer):
    """Notes when the backward of a call is over.

    Two calls that do not depend on each other share the engine's queue: their operators take turns,
    and both are live at a time. Then the gate of the first comes after the beginning of the second.
    """

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *tensors: paddle.Tensor) -> Any:
        ctx.done = done
        ctx.set_materialize_grads(False)
        # Only gradients go this way; the block gets its inputs themselves.
        return tuple(paddle.zeros([1], tensor.dtype) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.done()
        return gradients if len(gradients) > 1 else gradients[0]


@dataclass(eq=False)
class _Holder:
    """A call of a block; an argument that Paddle does not look into."""

    recorder: _Recorder
    place: int
    forward: Callable[..., Any] | None
    inputs: Any
    likenesses: list[tuple[Any, Any]]
    """Shape and dtype of the inputs that get gradients."""
    outputs: Any = None
    """Their structure, without the tensors that come out of `_Pass`."""


class _Pass(paddle.autograd.PyLayer):
    """A block whose backward computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: paddle.Tensor, holder: _Holder, *tensors: paddle.Tensor) -> Any:
        ctx.holder = holder
        ctx.set_materialize_grads(False)
        args, kwargs = holder.inputs
        assert holder.forward is not None
        result = holder.forward(*args, **kwargs)
        given = {id(tensor) for tensor in _nested.tensors_in(holder.inputs)}
        holder.outputs, passed = _nested.taken_out(
            result,
            lambda leaf: (
                _nested.is_tensor(leaf) and id(leaf) not in given and leaf.is_floating_point()
            ),
        )
        # A block that hands its input on (LayerDrop) has no backward; Paddle wants an output.
        return tuple(passed) or paddle.zeros([1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        holder, recorder = ctx.holder, ctx.holder.recorder
        recorder.event("backward", holder.place)
        del gradients
        found = [paddle.zeros(shape, dtype) for shape, dtype in holder.likenesses]
        holder.inputs = None
        recorder.has_begun_backward()
        return (paddle.zeros([1]), *found)


def _unique(tensors: Iterator[paddle.Tensor]) -> list[paddle.Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _pointers(value: Any) -> dict[int, int]:
    """Bytes of the distinct tensors in `value` by address, parameters left out."""
    return {
        tensor.data_ptr(): tensor.size * tensor.element_size()
        for tensor in _nested.tensors_in(value)
        if is_initialized(tensor) and not is_parameter(tensor)
    }


def _owns_its_memory(tensor: paddle.Tensor) -> bool:
    """Whether nothing says that `tensor` is a part of another one."""
    return look_of(tensor)[1:3] == (None, 0)


def _likenesses(inputs: Any) -> tuple[Any, ...]:
    return tuple((path, _likeness(leaf)) for path, leaf in _nested.named_leaves(inputs))


def _is_plain(leaf: Any) -> bool:
    return _nested.is_tensor(leaf) or isinstance(leaf, (int, float, str, bool, type(None)))


def _likeness(leaf: Any) -> Any:
    if _nested.is_tensor(leaf):
        return _nested.describe(leaf), leaf.stop_gradient
    return repr(leaf) if isinstance(leaf, (int, float, str, bool, type(None))) else type(leaf)
