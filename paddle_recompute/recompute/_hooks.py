"""One pair of saved-tensor hooks, shared by all recorders.

Paddle (2.6, 3.x) allows one pair of ``paddle.autograd.saved_tensors_hooks`` at a time. Ours is a
dispatcher: it passes each tensor that an operator saves to the innermost `Recorder`. The returned
`SavedHandle` replaces the tensor in the graph until the backward unpacks it.

**Threads.** The pair is in force in all threads of the process, but Paddle calls the hooks in the
thread that runs the operator or the backward. So each thread has its own recorders. In a
thread without a recorder, tensors are kept as Paddle would keep them. The pair is set while any
thread records. If several threads run operators, it also stays set between recordings: Paddle's
operators read the pair twice without a lock, and an operator crashes the process if another thread
removes the pair between the two reads (SIGSEGV; 2.6.2, 3.3.1).
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import paddle

from paddle_recompute._nested import describe
from paddle_recompute._paddle.backward import Backward, current_backward, raise_in_caller
from paddle_recompute._paddle.saved_tensors import (
    ENGINE_TAKES_MEMORY,
    PACK_LEAKS_A_REFERENCE,
    PY_LAYER_ASKS,
    TensorMetadata,
    before_saved_tensors_hooks,
    memory_for_engine,
    pack_references,
    shares_memory,
    version_of,
    with_layout,
    without_graph,
)
from paddle_recompute.errors import RecomputeError


class SavedHandle:
    """The handle that replaces a saved tensor in the graph. It keeps the tensor, with Paddle's
    check of ``inplace_version``.
    """

    __slots__ = ("__weakref__", "is_for_engine", "layout", "stop_gradient", "tensor", "version")

    is_for_engine: bool
    """Whether an operator of Paddle unpacks it, not a PyLayer; set on Paddle 2.6 only."""
    layout: TensorMetadata | None
    """The metadata of the first forward, if strides or offset of `tensor` differ."""
    stop_gradient: bool
    """That of what was saved, which a PyLayer may ask."""
    tensor: paddle.Tensor | None
    version: int

    def __init__(self, tensor: paddle.Tensor) -> None:
        self.is_for_engine, self.layout = False, None
        self.keep(tensor)

    def keep(self, tensor: paddle.Tensor) -> None:
        """Keep `tensor` without its graph (`without_graph`)."""
        self.tensor, self.stop_gradient = without_graph(tensor), tensor.stop_gradient
        self.version = version_of(tensor)

    def release(self) -> None:
        """The graph has freed the handle."""
        self.tensor = None

    def take(self, is_last: bool, same_object: bool) -> paddle.Tensor:
        """The tensor, unless it was changed in place; dropped if `is_last`."""
        kept = self.tensor
        if kept is None:
            raise RecomputeError(
                "A saved tensor was freed: its backward ran, or failed, without retain_graph=True."
            )
        if version_of(kept) != self.version:
            raise RecomputeError(
                f"A tensor ({describe(kept)}) that an operator saved for its backward was "
                "changed in place afterwards. Change a copy instead."
            )
        if self.layout is not None and not same_object:
            kept = with_layout(kept, self.layout)
        if is_last:
            self.tensor = None  # freed as in Paddle, even if the output is still referenced
        if same_object:
            if type(kept) is paddle.Tensor:  # not a parameter itself
                kept.stop_gradient = self.stop_gradient
            return kept
        if is_last and not ENGINE_TAKES_MEMORY:
            return kept
        return memory_for_engine(kept) if self.is_for_engine else shares_memory(kept)

    def value(self, is_last: bool, same_object: bool = False) -> paddle.Tensor:
        """The tensor, as a new object, because the engine may move the memory out of it (2.6).

        Args:
            is_last: Whether it is unpacked for the last time.
            same_object: Whether to return the very object that was kept, for a PyLayer.
        """
        return self.take(is_last, same_object)


def _keep(tensor: paddle.Tensor) -> SavedHandle:
    """The pack hook in a thread without a recorder."""
    _pair.register_thread()
    return SavedHandle(tensor)


class Recorder(Protocol):
    """Receives the tensors that operators save."""

    def pack(self, tensor: paddle.Tensor) -> SavedHandle | None:
        """Take `tensor`; the returned handle replaces it in the graph. Should not raise."""


class _Thread(threading.local):
    """The recorders of a thread."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []
        self.pack: Callable[[paddle.Tensor], SavedHandle | None] = _keep
        """The method of the innermost recorder."""
        self.is_known = False
        """Whether `_Pair` has registered this thread."""


_thread = _Thread()


class _Pair:
    """The pair of hooks, and the threads that run operators under it."""

    def __init__(self) -> None:
        # Reentrant: Paddle's function that sets a pair calls `make_room` in the same thread.
        self._lock = threading.RLock()
        self._num_recording = 0
        self._hooks: Any = None
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._is_shared = False
        """Whether more than one thread has ever run operators under it."""

    def enter(self) -> None:
        """Count one more recording thread.

        Raises:
            ValueError: Hooks of other code are in force.
        """
        with self._lock:
            if not _thread.is_known:
                self.register_thread()
            if self._hooks is None:
                hooks = _own_pair() if PACK_LEAKS_A_REFERENCE else _shared_pair
                hooks.__enter__()
                self._hooks = hooks
            self._num_recording += 1

    def leave(self) -> object:
        """Count one recording thread less.

        Returns:
            The unpack hook, which the graphs alone hold from now on; None if the pair stays set.
        """
        with self._lock:
            self._num_recording -= 1
            if self._is_shared:
                me = threading.current_thread()
                if any(thread is not me and thread.is_alive() for thread in self._threads):
                    before_saved_tensors_hooks(self.make_room)
                    return None
            return self.make_room()

    def make_room(self) -> object:
        """Remove the pair if no thread records; returns its unpack hook."""
        with self._lock:
            hooks = self._hooks
            if self._num_recording or hooks is None:
                return None
            hooks.__exit__(None, None, None)
            self._hooks = None
            return hooks.unpack_hook

    def close(self) -> None:
        """Remove the pair at exit; otherwise the process would hang."""
        self._num_recording = 0
        self.make_room()

    def register_thread(self) -> None:
        """Register the current thread as one that runs operators."""
        if not _thread.is_known:
            with self._lock:
                self._threads.add(threading.current_thread())
                self._is_shared = self._is_shared or len(self._threads) > 1
            _thread.is_known = True


_pair = _Pair()
atexit.register(_pair.close)


def innermost() -> Recorder | None:
    """The recorder that receives the saved tensors of this thread now."""
    return _thread.recorders[-1] if _thread.recorders else None


def enclosing() -> list[Recorder]:
    """The recorders of this thread, the innermost first."""
    return _thread.recorders[::-1]


def begin_recording(recorder: Recorder) -> bool:
    """Pass the saved tensors of this thread to `recorder`, until `end_recording`.

    Returns:
        False, with nothing begun, if hooks of other code are in force. Otherwise `end_recording`
        must follow.
    """
    recorders = _thread.recorders
    if not recorders:
        try:
            _pair.enter()
        except ValueError:  # Paddle: "only one pair of hooks is allowed at a time"
            return False
        if PACK_LEAKS_A_REFERENCE:
            pack_references.give_back()  # of handles with another unpack hook
    recorders.append(recorder)
    _thread.pack = recorder.pack
    return True


def is_nested_hooks_error(error: BaseException) -> bool:
    """Whether `error` is that of Paddle (2.6, 3.x) for a second pair of hooks."""
    return isinstance(error, ValueError) and "only one pair of hooks is allowed" in str(error)


def end_recording() -> None:
    """Undo the last `begin_recording` of this thread."""
    thread = _thread
    recorders = thread.recorders
    recorders.pop()
    thread.pack = recorders[-1].pack if recorders else _keep
    if not recorders:
        unpack = _pair.leave()
        if PACK_LEAKS_A_REFERENCE:
            pack_references.give_back(unpack)


def _pack(tensor: paddle.Tensor) -> object:
    return _thread.pack(tensor)


def _pack_and_note(tensor: paddle.Tensor) -> object:
    """`_pack` for Paddle versions that leak a reference to the returned handle."""
    thread = _thread
    handle = thread.pack(tensor)
    if handle is not None:
        if not thread.recorders:  # another thread records; this one has no end of recording
            pack_references.give_back()
        pack_references.note(handle, sys._getframe(1).f_code)
    return handle


def _unpack(handle: SavedHandle | None) -> paddle.Tensor:
    try:
        if handle is None:
            raise RecomputeError(
                "paddle.grad or backward was called inside a function that is being recomputed. "
                "Move that part out of the recomputed function."
            )
        backward = current_backward()
        is_last = backward is not None and not backward.retain_graph
        asker = sys._getframe(1)
        if backward is not None:
            if asker.f_code is PY_LAYER_ASKS:
                return _value_for_py_layer(handle, is_last, asker.f_locals["self"], backward)
            if backward.given:  # another operator unpacks, so the backward of that PyLayer is over
                backward.py_layer, backward.given = None, {}
        return handle.value(is_last)
    except BaseException as error:
        raise_in_caller(error)
        raise


def _value_for_py_layer(
    handle: SavedHandle, is_last: bool, context: Any, backward: Backward
) -> paddle.Tensor:
    """The value for the PyLayer of `context`, which may unpack a handle several times."""
    if backward.py_layer is not context:
        backward.py_layer, backward.given = context, {}
    if handle not in backward.given:
        backward.given[handle] = handle.value(is_last, same_object=True)
    value = backward.given[handle]
    # ``stop_gradient`` of an output was not set yet when it was saved.
    if backward.creates_graph and _may_need_gradient(value):
        raise RecomputeError(
            "A PyLayer in a recomputed function cannot be differentiated twice: under "
            "create_graph=True it would get what it saved without history, and the second "
            "derivative may lack terms. Call the PyLayer outside of recompute."
        )
    return value


def _may_need_gradient(tensor: paddle.Tensor) -> bool:
    return bool(paddle.is_floating_point(tensor) or paddle.is_complex(tensor))


_shared_pair = paddle.autograd.saved_tensors_hooks(_pack, _unpack)


def _own_pair() -> Any:
    """A pair with an unpack hook of its own, for Paddle versions that leak references."""
    return paddle.autograd.saved_tensors_hooks(_pack_and_note, functools.partial(_unpack))
