"""The hook form of recompute: drop what autograd saves, and run the function again to restore it.

While a function runs for the first time, each tensor that an operator saves for its backward is
replaced in the graph by a numbered handle. When the backward asks for the tensor of the first
handle, the function runs again. The tensors that its operators save then, in the same order, are
those of the handles. The gradients flow through the graph of the *first* run: hooks, parameters and
unused outputs behave as in a plain call.

This is the technique of Paddle's ``use_reentrant=False``. Paddle's own form cannot be used here:
its hooks are private, so it cannot nest, run twice, detect that the second run differs, or work on
CPU in 2.6.

**Nesting.** The outer frame saves the inputs of an inner frame. So an inner frame keeps nothing
unless its outer frame is being recomputed.

**Ownership.** C++ graph -> handle -> frame -> inputs, and, after the second run, handle -> tensor.
A frame refers to its handles weakly, so graph, activations and Layer are freed without the garbage
collector, and what only a dropped output needs goes with it.

A Layer may hold a tensor of its own forward, such as an auxiliary loss: Layer -> tensor -> graph ->
handle -> frame -> Layer is a cycle that Python cannot see. So the first backward that asks a frame
ends it: for a handle whose operator has not run then, the frame keeps the tensor of the second run
itself, as Paddle would.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import paddle

from paddle_recompute._paddle.backward import current_backward, set_gradients
from paddle_recompute._paddle.gradients import (
    begin_passing_hooks,
    end_passing_hooks,
    watch_hooks,
)
from paddle_recompute._paddle.saved_tensors import MetadataLists, dtype_of
from paddle_recompute.captured_state import Call
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute._hooks import (
    Recorder,
    SavedHandle,
    begin_recording,
    end_recording,
    innermost,
    is_of_second_pair,
)
from paddle_recompute.recompute._inputs import fetch, keep
from paddle_recompute.recompute._offload import InputStorage
from paddle_recompute.recompute._recomputation import (
    EndOfForward,
    KeptCall,
    Recomputation,
    checksum,
)


class FrameHandle(SavedHandle):
    """A placeholder in the graph for a tensor of a frame; after a second run of the frame, the
    tensor itself lies here, so it goes with the handle.
    """

    __slots__ = ("frame", "is_spent")

    frame: Frame
    is_spent: bool
    """Whether the backward of its operator is over and cannot run again."""

    def value(self, is_last: bool, itself: bool = False) -> paddle.Tensor:
        """The tensor, from a second run of the frame."""
        frame = self.frame
        if self.tensor is None:
            try:
                frame.recompute(is_last)
            finally:
                # The second run failed: Paddle never frees the argument of such a hook.
                if frame.is_released and not frame._failed:
                    self.frame = _RELEASED
        # Under ``retain_graph`` Paddle (2.6, 3.x) holds the memory in the graph anyway.
        value = self.take(is_last, itself)
        if is_last and not frame.is_released:
            if not self.is_spent:
                self.is_spent = True
                frame.num_awaited -= 1
            if not (frame.num_awaited and frame.is_ending):
                frame.end()
        return value

    def release(self) -> None:
        """It cannot be asked for any more."""
        self.tensor = None
        del self.frame


_new_handle = object.__new__
"""``FrameHandle()`` would take as long as all that `Frame.pack` reads of a tensor."""


class Observer(Protocol):
    """Called when calls run (`observed`)."""

    def forward(self, name: str, run: Callable[[], Any]) -> Any:
        """Run the call of the Layer `name` for the first time."""

    def recorded(self, frame: Frame) -> None:
        """`frame` records a call."""

    def again(self, frame: Frame, run: Callable[[], None]) -> None:
        """Run the call of `frame` again."""


class Frame:
    """A call that is recomputed: what its first run saved, and its inputs until the backward."""

    observer: ClassVar[Observer | None] = None
    again: Any = Recomputation
    """Makes what receives the tensors of the second run."""

    def __init__(self, call: Call | None) -> None:
        self.call = call
        """None: it is released."""
        self._inputs: Any = None
        self.storage: InputStorage
        """Keeps its inputs."""
        self.kept: list[KeptCall] = []
        """The calls of `keep` in its first run."""
        self._end_of_forward: KeptCall | None = None
        # Of each tensor that operators saved: what it looked like, its checksum, and the handle,
        # which the graph alone keeps.
        self.metadata: MetadataLists = [], [], [], []
        self.checksums: dict[int, int] = {}
        self.handles: list[weakref.ref[FrameHandle]] = []
        self._is_recording = self._compares_values = False
        self._failed = ""
        """The name of the call, if that raised in its first run."""
        self.is_ending = False
        self.num_awaited = 0
        """The handles that were in the graph at the last second run and are not spent."""

    def record(self, storage: InputStorage, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call for the first time; returns its result.

        Args:
            storage: Keeps its inputs.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Raises:
            HooksAreTaken: Before anything has run: hooks of other code are in force.
        """
        call, outer = self.call, innermost()
        assert call is not None
        self.storage = storage
        if not begin_recording(self):
            raise HooksAreTaken
        try:
            self._inputs = keep((args, kwargs), storage, _pack_of(outer))
            self._is_recording, self._compares_values = True, call.compare_values
            outputs = call.first(args, kwargs)
        except BaseException as error:  # the caller may catch the error and continue
            self._failed = call.name
            self.release()
            if is_of_second_pair(error):
                raise RecomputeError(
                    f"{call.name} brings saved_tensors_hooks into force, and Paddle allows one "
                    "pair at a time, which recompute needs here. If it calls fleet's recompute "
                    "(use_reentrant=False), call paddle_recompute.patch_fleet() first; other hooks "
                    "belong outside of the recomputed function"
                ) from error
            raise
        finally:
            self._is_recording = self._compares_values = False
            end_recording()
        if self.kept:
            self._find_end_of_forward(call)
        if self.observer is not None:
            self.observer.recorded(self)
        return outputs

    def _find_end_of_forward(self, call: Call) -> None:
        """If nothing was saved behind the last call of `keep`, its outputs are not needed."""
        last = self.kept[-1]
        is_end = last.part.has_returned and last.num_saved == len(self.handles)
        if is_end and not call.compare_values:
            self._end_of_forward = last
            if last.is_alone:
                last.part.outputs = None

    @property
    def is_released(self) -> bool:
        """Whether its inputs are gone, so that it cannot run again."""
        return self.call is None

    def release(self) -> None:
        """Let the inputs go, and what the call holds."""
        self.call = self._inputs = self._end_of_forward = None
        self.kept = []

    def pack(self, tensor: paddle.Tensor) -> FrameHandle:
        """First run: keep a handle, and what identifies the tensor in the second run."""
        dtypes, strides, offsets, sizes = self.metadata
        handle = _new_handle(FrameHandle)
        handle.frame, handle.tensor, handle.layout = self, None, None
        handle.is_spent = handle.is_for_engine = False
        dtypes.append(dtype_of(tensor))  # `metadata_of`, without a frame
        strides.append(None if tensor.is_contiguous() else tensor.strides)
        offsets.append(tensor.offset)
        sizes.extend(tensor.shape)  # a `paddle.Size` has an addition of its own
        sizes.append(None)
        self.handles.append(weakref.ref(handle))
        if self._compares_values:
            self.checksums[len(self.handles) - 1] = checksum(tensor)
        return handle

    def recompute(self, is_last: bool) -> None:
        """Run the call again, for all handles that are in the graph."""
        if self._is_recording:
            raise RecomputeError(
                "A recomputed function asks for gradients of its own intermediate results while "
                "it is still running (paddle.grad or backward inside it). Move that part out of "
                "the recomputed function."
            )
        if self._failed:
            raise RecomputeError(
                f"{self._failed} raised in its first forward, so the tensors that it computed "
                "before cannot be differentiated. Compute them outside of the recomputed function."
            )
        if self.call is None:
            raise RecomputeError(
                "The inputs of a recomputed function were released: its backward ran, or failed, "
                "without retain_graph=True."
            )
        try:
            if self.observer is None:
                self._recompute()
            else:
                self.observer.again(self, self._recompute)
        except BaseException:
            if is_last:  # Paddle keeps what it held when a hook raises
                self.release()
            raise

    def end(self) -> None:
        """Release the inputs once all handles have been asked for the last time, even if an output
        is still referenced: they need not wait for the blocks before this one.
        """
        if not self.is_ending:
            self.is_ending = True
            backward = current_backward()
            assert backward is not None
            backward.at_end[id(self)] = self._end
        if not self.num_awaited:
            self.release()

    def _end(self) -> None:
        """Release the inputs at the end of a backward, unless a handle needs another second run."""
        if all(
            handle is None or handle.is_spent or handle.tensor is not None
            for handle in self._live_handles()
        ):
            self.release()

    def _live_handles(self) -> list[FrameHandle | None]:
        """The handles; None where one is not in the graph any more."""
        return [reference() for reference in self.handles]

    def _recompute(self) -> None:
        call, handles = self.call, self._live_handles()
        assert call is not None
        again = self.again(
            call, self.kept, self._end_of_forward, self.metadata, self.checksums, handles
        )
        args, kwargs = fetch(self._inputs)
        # Enable gradients first: inside an unpack hook they are disabled, and Paddle ignores hooks
        # that are registered then.
        had_gradients = set_gradients(True)
        begin_recording(again)
        # On a tensor from outside, the hook of the first forward is there already.
        watch_hooks()
        hooks = begin_passing_hooks()
        try:
            call.repeat(args, kwargs)
        except (EndOfForward, Exception):
            if not again.has_ended:
                raise
        finally:
            end_passing_hooks(hooks)
            end_recording()
            set_gradients(had_gradients)
        again.finish()
        self.num_awaited = sum([not handle.is_spent for handle in handles if handle is not None])


_RELEASED = Frame(None)


class HooksAreTaken(Exception):
    """Saved-tensor hooks of other code are in force."""


class _DiscardAll:
    """Receives the tensors of an inner frame in its first run during the recompute of the outer
    frame: only the inner frame's inputs are needed, and the outer frame has them.
    """

    def pack(self, tensor: paddle.Tensor) -> None:
        return None


def is_inside_a_frame() -> bool:
    """Whether a recomputed function is running, for the first or the second time."""
    return innermost() is not None


def run_inside_recomputation(
    call: Call, storage: InputStorage, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an inner `call` while the outer frame is being recomputed."""
    keep((args, kwargs), storage, _pack_of(innermost()))
    begin_recording(_DiscardAll())
    try:
        return call.run(args, kwargs)
    finally:
        end_recording()


def is_inside_recomputation() -> bool:
    """Whether a recomputed function is running for the second time."""
    return isinstance(innermost(), (Recomputation, _DiscardAll))


def _pack_of(outer: Recorder | None) -> Callable[[paddle.Tensor], SavedHandle | None] | None:
    """What gives handles of the `outer` frame, if there is one."""
    return None if outer is None else outer.pack
