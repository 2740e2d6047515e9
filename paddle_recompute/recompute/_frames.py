"""The engine of recompute: saved-tensor hooks drop tensors, a second forward computes them again.

In the first forward the pack hook replaces each tensor that an operator saves by a numbered handle.
When the backward unpacks the first handle, the function runs again. The tensors that its operators
save in this second forward belong to the handles in the same order. Gradients flow through the
graph of the *first* forward: hooks, parameters and unused outputs behave as in a plain call.

Paddle's ``use_reentrant=False`` works in the same way. Its own implementation cannot be used here:
its hooks are private, so it cannot nest, run a backward twice, detect a second forward that
differs, or work on a CPU in 2.6.

**Nesting.** The outer frame keeps the inputs of an inner frame. So an inner frame keeps nothing
until its outer frame has been recomputed.

**Ownership.** C++ graph -> handle -> frame -> inputs, and, after the second forward, handle ->
tensor. A frame has weak references to its handles, so reference counting alone frees graph,
activations and Layer, and deleting an output frees the tensors that only it needs.

A Layer may hold a tensor of its own forward, such as an auxiliary loss: Layer -> tensor -> graph ->
handle -> frame -> Layer is a cycle that Python's collector cannot see. So the first backward
without ``retain_graph`` that unpacks from a frame releases its inputs. A handle whose operator's
backward has not run by then keeps the recomputed tensor, as Paddle keeps a saved tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import paddle

from paddle_recompute._paddle.backward import current_backward, set_gradients
from paddle_recompute._paddle.gradients import (
    begin_temporary_hooks,
    remove_temporary_hooks,
    watch_hooks,
)
from paddle_recompute._paddle.saved_tensors import MetadataLists, dtype_of
from paddle_recompute.captured_state import Call
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute._hooks import (
    SavedHandle,
    begin_recording,
    end_recording,
    innermost,
    is_nested_hooks_error,
)
from paddle_recompute.recompute._inputs import fetch, save_inputs
from paddle_recompute.recompute._offload import InputStorage
from paddle_recompute.recompute._recomputation import (
    KeptCall,
    Recomputation,
    StopRecomputation,
    checksum,
)


class FrameHandle(SavedHandle):
    """The handle of a saved tensor of a frame. After the second forward it holds the tensor, which
    is freed with the handle.
    """

    __slots__ = ("frame", "is_spent")

    frame: Frame
    is_spent: bool
    """Whether a backward without ``retain_graph`` has unpacked it."""

    def value(self, is_last: bool, same_object: bool = False) -> paddle.Tensor:
        """The tensor, from a second forward of the frame."""
        frame = self.frame
        if self.tensor is None:
            try:
                frame.recompute(is_last)
            finally:
                # If it raised, drop the frame: Paddle leaks the argument of a hook that raises.
                if frame.call is None and not frame._failed_name:
                    self.frame = _RELEASED
        # Not the last unpack: the graph still holds the memory (2.6, 3.x), so the handle may, too.
        value = self.take(is_last, same_object)
        if is_last and frame.call is not None:
            if not self.is_spent:
                self.is_spent = True
                frame.num_awaited -= 1
            if not (frame.num_awaited and frame.is_release_scheduled):
                frame.release_after_backward()
        return value

    def release(self) -> None:
        """Drop tensor and frame: the graph has freed the handle."""
        self.tensor = None
        del self.frame


_new_handle = object.__new__
"""Bypasses ``__init__``: ``FrameHandle()`` would double the time of `Frame.pack`."""


class Observer(Protocol):
    """Notified of the two forwards of each recomputed call; installed by `observed`."""

    def forward(self, name: str, run: Callable[[], Any]) -> Any:
        """Run the first forward of the Layer `name`."""

    def recorded(self, frame: Frame) -> None:
        """`frame` has recorded a call."""

    def second_forward(self, frame: Frame, run: Callable[[], None]) -> None:
        """Run the second forward of `frame`."""


class Frame:
    """A recomputed call: its inputs until the backward, and the handles of its saved tensors."""

    observer: ClassVar[Observer | None] = None
    new_recomputation: Any = Recomputation
    """Makes the recorder of a second forward."""

    def __init__(self, call: Call | None) -> None:
        self.call = call
        """None: the inputs are released."""
        self._inputs: Any = None
        self.storage: InputStorage
        """Keeps the inputs."""
        self.kept: list[KeptCall] = []
        """The calls of `paddle_recompute.keep` in its first forward."""
        self._end_of_forward: KeptCall | None = None
        # Metadata, checksum and weak reference to the handle of each saved tensor.
        self.metadata: MetadataLists = [], [], [], []
        self.checksums: dict[int, int] = {}
        self.handles: list[weakref.ref[FrameHandle]] = []
        self._is_recording = self._compares_values = False
        self._failed_name = ""
        """The name of the call if its first forward raised, else ""."""
        self.is_release_scheduled = False
        self.num_awaited = 0
        """How many handles in the graph have a tensor from the latest second forward that is still
        to be unpacked for the last time.
        """

    def record(self, storage: InputStorage, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the first forward; returns its result.

        Args:
            storage: Keeps the inputs.
            args: Positional arguments.
            kwargs: Keyword arguments.

        Raises:
            HooksAreTaken: Saved-tensor hooks of other code are in force; the call has not run.
        """
        call, outer = self.call, innermost()
        assert call is not None
        self.storage = storage
        if not begin_recording(self):
            raise HooksAreTaken
        try:
            pack = None if outer is None else outer.pack
            self._inputs = save_inputs((args, kwargs), storage, pack)
            self._is_recording, self._compares_values = True, call.compare_values
            outputs = call.first(args, kwargs)
        except BaseException as error:  # the caller may catch the error and continue
            self._failed_name = call.name
            self.release()
            if is_nested_hooks_error(error):
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
        """Stop the second forward early, after the last call of `keep`, if nothing is saved after
        it; the outputs of that call are not needed then.
        """
        last = self.kept[-1]
        is_end = last.part.has_returned and last.num_saved == len(self.handles)
        if is_end and not call.compare_values:
            self._end_of_forward = last
            if last.is_alone:
                last.part.outputs = None

    def release(self) -> None:
        """Release the inputs and the state of the call."""
        self.call = self._inputs = self._end_of_forward = None
        self.kept = []

    def pack(self, tensor: paddle.Tensor) -> FrameHandle:
        """First forward: return a handle for `tensor`, and record the metadata with which the
        second forward is compared.
        """
        dtypes, strides, offsets, sizes = self.metadata
        handle = _new_handle(FrameHandle)
        handle.frame, handle.tensor, handle.layout = self, None, None
        handle.is_spent = handle.is_for_engine = False
        dtypes.append(dtype_of(tensor))  # `metadata_of`, inlined: saves a Python call
        strides.append(None if tensor.is_contiguous() else tensor.strides)
        offsets.append(tensor.offset)
        sizes.extend(tensor.shape)  # not `+=`: `paddle.Size` overloads `+`
        sizes.append(None)
        self.handles.append(weakref.ref(handle))
        if self._compares_values:
            self.checksums[len(self.handles) - 1] = checksum(tensor)
        return handle

    def recompute(self, is_last: bool) -> None:
        """Run the second forward, for all handles that are in the graph."""
        if self._is_recording:
            raise RecomputeError(
                "A recomputed function asks for gradients of its own intermediate results while "
                "it is still running (paddle.grad or backward inside it). Move that part out of "
                "the recomputed function."
            )
        if self._failed_name:
            raise RecomputeError(
                f"{self._failed_name} raised in its first forward, so the tensors that it computed "
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
                self.observer.second_forward(self, self._recompute)
        except BaseException:
            if is_last:  # Paddle does not free the handles when a hook raises
                self.release()
            raise

    def release_after_backward(self) -> None:
        """Release the inputs once no handle awaits its last unpack, before the backward goes on to
        earlier blocks; at the latest when the backward ends, even if an output is referenced.
        """
        if not self.is_release_scheduled:
            self.is_release_scheduled = True
            backward = current_backward()
            assert backward is not None
            backward.at_end[id(self)] = self._release_if_unused
        if not self.num_awaited:
            self.release()

    def _release_if_unused(self) -> None:
        """Release the inputs at the end of a backward, unless a handle needs a second forward."""
        if self.call is not None and all(
            handle is None or handle.is_spent or handle.tensor is not None
            for handle in self._live_handles()
        ):
            self.release()

    def _live_handles(self) -> list[FrameHandle | None]:
        """The handles; None for those that the graph has freed."""
        return [reference() for reference in self.handles]

    def _recompute(self) -> None:
        call, handles = self.call, self._live_handles()
        assert call is not None
        recomputation = self.new_recomputation(
            call, self.kept, self._end_of_forward, self.metadata, self.checksums, handles
        )
        args, kwargs = fetch(self._inputs)
        # Enable gradients first: inside an unpack hook they are disabled, and Paddle ignores hooks
        # that are registered then.
        had_gradients = set_gradients(True)
        if not begin_recording(recomputation):
            set_gradients(had_gradients)
            raise RecomputeError(
                f"The backward of {call.name} runs where other saved_tensors_hooks are in force, "
                "and Paddle allows one pair at a time, which recompute needs. Call backward "
                "outside of them."
            )
        # The hooks of the first forward on captured tensors are in force; those that the second one
        # registers are removed after it.
        watch_hooks()
        hooks = begin_temporary_hooks()
        try:
            call.repeat(args, kwargs)
        except (StopRecomputation, Exception):
            if not recomputation.has_ended:
                raise
        finally:
            remove_temporary_hooks(hooks)
            end_recording()
            set_gradients(had_gradients)
        recomputation.finish()
        self.num_awaited = sum([not handle.is_spent for handle in handles if handle is not None])


_RELEASED = Frame(None)


class HooksAreTaken(Exception):
    """Saved-tensor hooks of other code are in force."""


class _DiscardAll:
    """The recorder of an inner frame while its outer frame is recomputed: nothing is kept, because
    the outer frame has the inner frame's inputs.
    """

    def pack(self, tensor: paddle.Tensor) -> None:
        return None


def is_inside_a_frame() -> bool:
    """Whether a recomputed function is running, in its first or second forward."""
    return innermost() is not None


def run_inside_recomputation(
    call: Call, storage: InputStorage, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an inner `call` while its outer frame is recomputed."""
    # Packs the inputs into the outer recomputation, in order, as the first forward did.
    outer = innermost()
    assert outer is not None
    save_inputs((args, kwargs), storage, outer.pack)
    begin_recording(_DiscardAll())
    try:
        return call.run(args, kwargs)
    finally:
        end_recording()


def is_inside_recomputation() -> bool:
    """Whether a recomputed function is running in its second forward."""
    return isinstance(innermost(), (Recomputation, _DiscardAll))
