"""`keep`: a part of a recomputed function that its second forward does not run.

A tensor that an operator of the part saves and that shares memory with an argument becomes a handle
as elsewhere: the second forward computes the argument again, and packs a view of it. Other saved
tensors and the outputs are kept. So a part that is one matrix product, or a fused attention, costs
the bytes of its outputs.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._nested import describe
from paddle_recompute._paddle.layers import is_initialized
from paddle_recompute._paddle.saved_tensors import (
    TensorMetadata,
    metadata_of,
    version_of,
    with_layout,
)
from paddle_recompute._paddle.static.marks import kept_operators
from paddle_recompute._paddle.translation import skip_sot
from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute._paddle.writes import address_of
from paddle_recompute.captured_state import (
    RECOMPUTATION_ADVICE,
    StateAfter,
    is_written_since,
    name_of,
)
from paddle_recompute.captured_state import stamp as stamp_of
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import _inputs
from paddle_recompute.recompute._frames import Frame, is_inside_recomputation
from paddle_recompute.recompute._hooks import (
    Recorder,
    SavedHandle,
    begin_recording,
    enclosing,
    end_recording,
)
from paddle_recompute.recompute._offload import InputStorage, OnDevice
from paddle_recompute.recompute._recomputation import KeptCall, Recomputation, StopRecomputation
from paddle_recompute.recompute.layer import WrappedLayer, thread


@paddle.jit.not_to_static
def keep(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function(*args, **kwargs)``; inside a recomputed function, once instead of twice.

    The second forward of the recomputed function does not run `function`: it takes the outputs of
    the first one. The backward of `function` uses what its operators saved in the first forward.
    Until then the outputs and what the operators saved are kept, but for what lies in the memory of
    an argument: a linear layer costs the bytes of its output. Random streams, buffers of the Layers
    that `function` calls, and tensors that it assigns to them, go on as after the first call.
    Anywhere else, and in the second forward of `GradCache` and `OffloadSequential`, this is the
    plain call.

    In a Program the operators of `function` are not copied into the backward.

    Args:
        function: A Layer or any callable. Other changes that it makes, to lists or numbers, are not
            made again; the recomputed function must not read them.
        *args: Its arguments. Hand in large tensors here: one that `function` captures is kept.
        **kwargs: Its keyword arguments.

    Returns:
        What `function` returns.

    Raises:
        RecomputeError: `function` changes an argument in place; or, raised by the backward, an
            output was changed in place, or the second forward does not repeat the calls of `keep`.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import keep, recompute
        >>> up, down = paddle.nn.Linear(4, 16), paddle.nn.Linear(16, 4)
        >>> y = recompute(lambda x: x + keep(down, up(x).tanh()), paddle.ones([2, 4]))
        >>> y.sum().backward()
    """
    if not thread.keeps:
        return function(*args, **kwargs)
    if not is_dygraph():
        with kept_operators():
            return function(*args, **kwargs)
    recorders = enclosing()
    if is_inside_recomputation():
        repetition = next(recorder for recorder in recorders if isinstance(recorder, Recomputation))
        if not repetition.has_ended:
            return _again(repetition, recorders[0], function, args, kwargs)
    frames = [*itertools.takewhile(lambda one: isinstance(one, Frame), recorders)]
    return _first(frames, function, args, kwargs) if frames else function(*args, **kwargs)


skip_sot(keep)


class KeptFunction:
    """A function that a Layer holds as an attribute; its calls are a `keep`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as a `keep`."""
        return keep(self.function, *args, **kwargs)


@functools.cache
def keeping(method: str) -> type[WrappedLayer]:
    """The wrapper class for a Layer whose `method` is called as a `keep`."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return keep(getattr(super(wrapping, self), method), *args, **kwargs)

    members = {method: call, "__module__": __name__, "_added": ()}
    wrapping: type[WrappedLayer] = type(f"Keeping_{method}", (WrappedLayer,), members)
    return wrapping


def __getattr__(name: str) -> Any:  # a pickle looks for the class of `keeping` here
    if name.startswith("Keeping_"):
        return keeping(name.removeprefix("Keeping_"))
    raise AttributeError(name)


_Tie = tuple[int, TensorMetadata, TensorMetadata, bool]


@dataclass(slots=True)
class _Part:
    """One call of `keep` in a first forward.

    Attributes:
        name: The name of its function in errors.
        called: Its function and the metadata of its argument tensors, in words.
        ties: For each handle: the number of the argument that shares its memory, the metadata of
            both, and ``stop_gradient`` of what was saved.
        outputs: A `_Tied` or `_inputs.Input` for each output tensor; None: they are not needed.
        state: What the part writes to the Layers that it calls.
        has_returned: Whether its first forward returned; if it raised, it runs again.
    """

    name: str
    called: str
    ties: list[_Tie] = field(default_factory=list)
    outputs: Any = None
    state: StateAfter = field(default_factory=StateAfter)
    has_returned: bool = False


def _described(function: Callable[..., Any], given: list[paddle.Tensor]) -> str:
    return f"keep({name_of(function)}) of {', '.join(map(describe, given))}"


def _first(
    frames: list[Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a part in a first forward; `frames` are the enclosing ones, the innermost first."""
    given = [*_nested.tensors_in((args, kwargs))]
    stamps = [*map(stamp_of, given)]
    part = _Part(f"keep({name_of(function)})", _described(function, given))
    recorder = _Keeping(frames[0], given, part.ties)
    part.state.begin(getattr(function, "__self__", None))
    begin_recording(recorder)
    try:
        outputs = function(*args, **kwargs)
        for tensor, stamp in zip(given, stamps, strict=True):
            if is_written_since(tensor, stamp):
                raise RecomputeError(
                    f"{part.name} changes an argument ({describe(tensor)}) in place, which the "
                    "second forward, that does not run it, would not do. Let it change a copy."
                )
        part.outputs = recorder.keep_outputs(outputs, frames[-1].storage, part)
        part.has_returned = True
    finally:
        end_recording()
        part.state.end()
        for frame in frames:
            frame.kept.append(
                KeptCall(part, frame.call.rng_state_now(), len(frame.handles), len(frames) == 1)
            )
    return outputs


def _again(
    repetition: Recomputation,
    recorder: Recorder,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The outputs of a part in a second forward; `recorder` packs the views for its handles."""
    given = [*_nested.tensors_in((args, kwargs))]
    kept, called = next(repetition.kept, None), _described(function, given)
    if kept is None or kept.part.called != called:
        raise RecomputeError(
            f"The second forward calls {called}, where its first forward called "
            f"{'no keep' if kept is None else kept.part.called}. {RECOMPUTATION_ADVICE}"
        )
    part: _Part = kept.part
    if not part.has_returned:
        begin_recording(_Keeping(recorder, given, []))
        try:
            return function(*args, **kwargs)
        finally:
            end_recording()
    for position, was, metadata, stop_gradient in part.ties:
        tensor = _over(given[position], was, metadata)
        if tensor.stop_gradient != stop_gradient:
            tensor = tensor.detach()
            tensor.stop_gradient = stop_gradient  # a PyLayer may ask
        recorder.pack(tensor)
    if kept is repetition.end:
        repetition.has_ended = True
        raise StopRecomputation
    repetition.call.skip_to(kept.rng_state, part.state)

    def fetch(leaf: Any) -> Any:
        if type(leaf) is not _Tied:
            return leaf
        tensor = given[leaf.position]
        if leaf.metadata is None:
            return tensor
        tensor = _over(tensor.detach(), leaf.was, leaf.metadata)  # not the argument itself
        tensor.stop_gradient = leaf.stop_gradient
        return tensor

    return _nested.map_leaves(fetch, _inputs.fetch(part.outputs))


class _Tied:
    """An output that is an argument (`metadata`: None) or shares memory with one."""

    __slots__ = ("metadata", "position", "stop_gradient", "was")

    def __init__(
        self,
        position: int,
        was: TensorMetadata,
        metadata: TensorMetadata | None,
        stop_gradient: bool,
    ) -> None:
        self.position, self.was, self.metadata, self.stop_gradient = (
            position,
            was,
            metadata,
            stop_gradient,
        )


class _Keeping:
    """The recorder of the tensors that operators of a part save.

    Args:
        recorder: Makes the handles of tensors that share memory with an argument.
        given: The argument tensors.
        ties: See `_Part`.
    """

    def __init__(
        self,
        recorder: Recorder,
        given: list[paddle.Tensor],
        ties: list[_Tie],
    ) -> None:
        self._recorder, self._given, self._ties = recorder, given, ties
        self._metadata = [*map(metadata_of, given)]
        self._memories = [*map(_memory_of, given)]
        self._kept: list[weakref.ref[_Waiting]] = []

    def pack(self, tensor: paddle.Tensor) -> SavedHandle | None:
        position, metadata = self._where(tensor)
        if position is None:
            kept = _Waiting(tensor)
            self._kept.append(weakref.ref(kept))
            return kept
        self._ties.append((position, self._metadata[position], metadata, tensor.stop_gradient))
        return self._recorder.pack(tensor)

    def _where(self, tensor: paddle.Tensor) -> tuple[int | None, TensorMetadata]:
        """The number of the argument whose memory contains `tensor`, and the metadata of
        `tensor`.
        """
        metadata, memory = metadata_of(tensor), _memory_of(tensor)
        for position, (was, one) in enumerate(zip(self._metadata, self._memories, strict=True)):
            if one is not None and one == memory and _covers(was, metadata, tensor.element_size()):
                return position, metadata
        return None, metadata

    def keep_outputs(self, outputs: Any, storage: InputStorage, part: _Part) -> Any:
        """The `outputs` of `part` for the second forward, where `storage` keeps tensors; there it
        also sends what was saved.
        """

        def tied(leaf: Any) -> Any:
            if not _nested.is_tensor(leaf):
                return leaf
            for position, (tensor, was) in enumerate(zip(self._given, self._metadata, strict=True)):
                if tensor is leaf:
                    return _Tied(position, was, None, leaf.stop_gradient)
            where, metadata = self._where(leaf)
            if where is None:
                return leaf
            return _Tied(where, self._metadata[where], metadata, leaf.stop_gradient)

        once = _Once(storage)
        for reference in self._kept if not isinstance(storage, OnDevice) else ():
            if (kept := reference()) is not None:
                kept.send(once)
        what = f"An output of {part.name}"
        return _inputs.save_inputs(_nested.map_leaves(tied, outputs), once, None, what)


class _Once:
    """A storage that keeps a tensor once that operators have saved and a part returns."""

    def __init__(self, storage: InputStorage) -> None:
        self._storage = storage
        self._kept: dict[Any, Any] = {}

    def keep(self, tensor: paddle.Tensor) -> Any:
        key = address_of(tensor), str(metadata_of(tensor))
        if key not in self._kept:
            self._kept[key] = self._storage.keep(tensor)
        return self._kept[key]


class _Waiting(SavedHandle):
    """A saved tensor of a part: kept on the device, or offloaded with the inputs of its
    function.
    """

    __slots__ = ("_away", "_stays")

    def __init__(self, tensor: paddle.Tensor) -> None:
        super().__init__(tensor)
        self._away: Any = None
        self._stays = tensor.is_leaf and not tensor.stop_gradient  # a parameter, mostly

    def send(self, storage: InputStorage) -> None:
        """Offload the tensor to `storage`."""
        tensor = self.tensor
        assert tensor is not None
        if self._stays or version_of(tensor) != self.version or not is_initialized(tensor):
            return
        kept = storage.keep(tensor)
        if not _nested.is_tensor(kept):
            self._away, self.layout, self.tensor = kept, metadata_of(tensor), None

    def value(self, is_last: bool, same_object: bool = False) -> paddle.Tensor:
        """See `SavedHandle`."""
        if self.tensor is None and self._away is not None:
            tensor = self._away.load()
            tensor.stop_gradient = self.stop_gradient
            self.keep(tensor)
        if is_last:
            self._away = None
        return super().value(is_last, same_object)


# ---------------------------------------------------------------------------- metadata and memory


def _memory_of(tensor: paddle.Tensor) -> int | None:
    """The address of the allocation of `tensor`; None: it has no memory."""
    address = address_of(tensor)
    return None if address is None or not tensor.size else address - tensor.offset


def _covers(whole: TensorMetadata, part: TensorMetadata, itemsize: int) -> bool:
    """Whether every element of a tensor is one of another in the same memory, which looks like it
    or has no gaps.
    """
    if whole == part:
        return True
    dtype, strides, offset, shape = whole
    if dtype != part[0] or strides is not None or part[2] < offset:
        return False
    last = sum((n - 1) * step for n, step in zip(part[3], _strides_of(part), strict=True))
    return bool(part[2] + last * itemsize < offset + math.prod(shape) * itemsize)


def _strides_of(metadata: TensorMetadata) -> Any:
    _, strides, _, shape = metadata
    if strides is None:
        return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return strides


def _over(tensor: paddle.Tensor, was: TensorMetadata, metadata: TensorMetadata) -> paddle.Tensor:
    """The tensor of `metadata` in the memory of `tensor`, whose metadata were `was`."""
    if metadata == was:
        return tensor
    flag = "FLAGS_use_stride_kernel"
    with paddle.no_grad():
        memory = with_layout(tensor.detach(), was)
        if paddle.get_flags(flag)[flag]:
            return paddle.as_strided(memory, metadata[3], _strides_of(metadata), metadata[2])
        return paddle.reshape(memory, metadata[3])
