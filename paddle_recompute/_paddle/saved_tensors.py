"""Saved-tensor hooks, and tensors that share memory with what an operator saved."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

import paddle
from paddle.autograd.py_layer import PyLayerContext
from paddle.base import core

from paddle_recompute._paddle.amp import OFF, amp_state_of
from paddle_recompute._paddle.layers import is_parameter
from paddle_recompute._paddle.version import paddle_version


def shares_memory(tensor: paddle.Tensor) -> paddle.Tensor:
    """A new tensor over the same memory, with no gradient history and an identity of its own.

    ``Tensor.detach`` does not serve: it shares the C++ tensor itself (see `ENGINE_TAKES_MEMORY`).
    ``_new_shared_tensor`` exists from 3.0; on 2.6 ``_share_buffer_to`` gives a bare tensor memory,
    and ``get_tensor()._share_data_with`` the shape, strides and offset, too. (``Tensor()`` would
    take three times as long; a view of the same dtype has no kernel with
    ``FLAGS_use_stride_kernel=0``.) Can go when a public shallow copy exists in every supported
    version.
    """
    if _HAS_SHALLOW_COPY:
        shared = tensor._new_shared_tensor()
        if not shared.is_leaf:
            shared = shared.detach()
    else:
        if tensor._is_initialized():
            shared = _bare(core.eager.Tensor)
            tensor._share_buffer_to(shared)
        else:
            shared = core.eager.Tensor(
                tensor.dtype, tensor.shape, "", core.VarDesc.VarType.LOD_TENSOR, False
            )
        shared.get_tensor()._share_data_with(tensor.get_tensor())
    shared.stop_gradient = tensor.stop_gradient
    return shared


def memory_for_engine(tensor: paddle.Tensor) -> paddle.Tensor:
    """What the engine of 2.6 may empty: the memory of `tensor` in a tensor without a shape.

    The engine takes nothing else. It is made in a fifth of the time of `shares_memory`.
    """
    if not tensor._is_initialized():
        return shares_memory(tensor)
    memory = _bare(core.eager.Tensor)
    tensor._share_buffer_to(memory)
    return memory


_bare = core.eager.Tensor.__new__
_HAS_SHALLOW_COPY = hasattr(core.eager.Tensor, "_new_shared_tensor")
ENGINE_TAKES_MEMORY = not _HAS_SHALLOW_COPY
"""Paddle 2.6 moves the memory out of what an unpack hook returns, also if other tensors share the
C++ tensor; 3.x leaves it there. Can go with 2.6."""
version_of: Callable[[paddle.Tensor], int] = core.eager.Tensor._inplace_version
"""What ``Tensor.inplace_version`` calls (2.6, 3.x), without its Python frame."""

_HAS_ATTRIBUTES = core.eager.Tensor.__dictoffset__ > 0
"""From 3.0 a user may put attributes on any tensor; on 2.6, on parameters alone."""


def without_graph(tensor: paddle.Tensor) -> paddle.Tensor:
    """What to keep of a tensor that was saved: the same C++ tensor, hence the same version counter,
    with its attributes and without its graph. ``stop_gradient``, which takes long to set, is true.

    A parameter is kept as it is. Of what operators save, hooks get new Python objects; a PyLayer
    (2.6, 3.x) gives the object that it was given, and asks for that.
    """
    if type(tensor) is not paddle.Tensor and is_parameter(tensor):
        return tensor
    kept = tensor.detach()
    if _HAS_ATTRIBUTES and (attributes := tensor.__dict__):
        kept.__dict__.update(attributes)
    return kept


TensorMetadata = tuple[Any, Any, int, list[int]]
"""`dtype_of`, strides (in elements; None: contiguous) and offset in its memory (in bytes) of a
tensor, and its shape."""


def metadata_of(tensor: paddle.Tensor) -> TensorMetadata:
    """What a tensor lists like, and how it lies in its memory (``strides``, ``offset``; 2.6, 3.x).

    ``nn.LSTM`` in eval mode saves a tensor without memory, ``paddle.einsum`` an empty one: 3.3 and
    2.6 crash when the strides of such a tensor are read. Both are contiguous.
    """
    strides = None if tensor.is_contiguous() else tensor.strides
    return dtype_of(tensor), strides, tensor.offset, tensor.shape


MetadataLists = tuple[list[Any], list[Any], list[Any], list[Any]]
"""The metadata of many tensors as four lists, the sizes of all shapes in one with a None after each
shape: few objects for the garbage collector."""


def metadata_lists_of(tensors: list[Any]) -> MetadataLists:
    """`metadata_of` each of `tensors`, in C where that is possible."""
    contiguous = zip(tensors, map(_is_contiguous, tensors), strict=True)
    sizes: list[Any] = []
    for shape in map(_shape_of, tensors):
        sizes.extend(shape)
        sizes.append(None)
    return (
        [*map(dtype_of, tensors)],
        [None if is_so else tensor.strides for tensor, is_so in contiguous],
        [*map(_offset_of, tensors)],
        sizes,
    )


def each_metadata(lists: MetadataLists) -> list[TensorMetadata]:
    """The metadata of each tensor, from the lists."""
    dtypes, strides, offsets, sizes = lists
    shapes: list[list[int]] = [[]]
    for size in sizes:
        if size is None:
            shapes.append([])
        else:
            shapes[-1].append(size)
    return [*zip(dtypes, strides, offsets, shapes[:-1], strict=True)]


_is_contiguous = core.eager.Tensor.is_contiguous
_read_dtype, _offset_of, _shape_of = (
    getattr(core.eager.Tensor, name).__get__ for name in ("dtype", "offset", "shape")
)
_DTYPES_ARE_SINGLE = paddle_version() >= (3, 0, 0)
dtype_of: Callable[[paddle.Tensor], Any] = (
    _read_dtype if _DTYPES_ARE_SINGLE else operator.attrgetter("dtype.value")
)
"""The dtype of a tensor, as an object that compares fast: Paddle 2.6 makes a new dtype each time,
and its number is taken (``VarType.value``). Can go with 2.6."""


def dtype_in(metadata: TensorMetadata) -> Any:
    """The dtype of a tensor with this `metadata`."""
    return metadata[0] if _DTYPES_ARE_SINGLE else paddle.dtype(metadata[0])


def with_layout(tensor: paddle.Tensor, metadata: TensorMetadata) -> paddle.Tensor:
    """`tensor`, or a copy of it that lies in its memory as a tensor with this `metadata` does.

    The engine (2.6, 3.x) takes the bare memory from what an unpack hook returns, and reads it with
    the strides and the offset of the tensor that the operator had saved. Can go when the engine
    takes the tensor itself.
    """
    _, strides, offset, shape = metadata
    if metadata_of(tensor)[1:3] == (strides, offset) or 0 in shape or not tensor._is_initialized():
        return tensor
    if strides is None:
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    with paddle.no_grad(), amp_state_of(OFF):
        memory = paddle.zeros([offset // tensor.element_size() + last + 1], tensor.dtype)
        copy = paddle.as_strided(memory, tensor.shape, strides, offset)
        paddle.assign(tensor, output=copy)
    copy.stop_gradient = tensor.stop_gradient
    return copy


@functools.cache
def before_saved_tensors_hooks(call: Callable[[], None]) -> None:
    """From now on, `call` is called before a pair of saved-tensor hooks comes into force.

    So that a pair of ours that only waits can give way to a user's.
    ``core.eager.register_saved_tensors_hooks`` (2.6, 3.x) is what
    ``paddle.autograd.saved_tensors_hooks`` looks up at each use. Can go when Paddle allows several
    pairs, or one per thread.
    """
    register = core.eager.register_saved_tensors_hooks

    @functools.wraps(register)
    def registered(*args: Any, **kwargs: Any) -> Any:
        call()
        return register(*args, **kwargs)

    core.eager.register_saved_tensors_hooks = registered


PY_LAYER_ASKS = PyLayerContext.saved_tensor.__code__
"""The code that calls an unpack hook where a PyLayer asks for what it saved (2.6, 3.x), with its
context as ``self``; else C++ of an operator does. Can go when a hook learns which operator asks."""

_PY_LAYER_SAVES = PyLayerContext.save_for_backward.__code__
"""The code that calls a pack hook where a PyLayer saves tensors (2.6, 3.x)."""

PACK_LEAKS_A_REFERENCE = paddle_version() < (3, 0, 0)
"""Paddle 2.6 adds a reference to a handle, the result of a pack hook, each time that it copies what
holds the handle, and never drops it: once where an operator saves one tensor, up to four times
where it saves a list, and once in each ``paddle.grad``, which copies the graph."""


class _PackReferences(threading.local):
    """The handles of a thread, and the references to them that Paddle 2.6 forgets.

    Can go with 2.6.
    """

    def __init__(self) -> None:
        self._issued: list[Any] = []
        self._savers: list[Any] = []
        """For each that was issued, the code that called the operator."""
        self._in_graphs: list[weakref.ref[Any]] = []
        self._enough = 0
        """How many `_in_graphs` there may be until those that are gone are left out."""

    def note(self, handle: Any, saver: CodeType) -> None:
        """`handle` is the result of a pack hook, which `saver` called."""
        if saver is not _PY_LAYER_SAVES:  # it has one holder, and no copies
            self._issued.append(handle)
            self._savers.append(saver)

    def give_back(self, unpack: object = None) -> None:
        """Drop the forgotten references to the handles that were issued.

        To be called when the operators that saved them have returned. Of those in a graph,
        `is_for_engine` is set. One whose operator is gone already has no holder, but still the
        reference from the copy. A custom operator does not copy: its one reference is the holder.

        Args:
            unpack: A hook that the graphs hold, and nothing else. Several references may be a
                holder, or copies in a list whose operator is gone: those go with the graphs.
        """
        alive = []
        savers = iter(self._savers)
        own = 3  # the list, the name `handle`, and the argument of getrefcount
        for handle in self._issued:
            saver = next(savers)
            num_holders = sys.getrefcount(handle) - own
            if num_holders >= 2:
                # One is a copy for sure; a traceback may be another, so no more are dropped.
                _drop_reference(handle)
                handle.is_for_engine = True
                alive.append(weakref.ref(handle))
            elif num_holders and "_run_custom_op" not in saver.co_names:
                _drop_reference(handle)
        self._issued.clear()
        self._savers.clear()
        if alive and unpack is not None:
            weakref.finalize(unpack, _release, alive).atexit = False
        self._in_graphs += alive
        if len(self._in_graphs) > self._enough:
            self._in_graphs = [
                reference for reference in self._in_graphs if _is_in_graph(reference())
            ]
            self._enough = 2 * len(self._in_graphs) + 30

    def around(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        """``paddle.grad``'s `engine`, without the references that it adds to handles in graphs."""

        @functools.wraps(engine)
        def run(*args: Any, **kwargs: Any) -> Any:
            found = [
                (handle, sys.getrefcount(handle))
                for reference in self._in_graphs
                if (handle := reference()) is not None
            ]
            result = engine(*args, **kwargs)  # the traceback of an error would refer to handles too
            for handle, before in found:
                if sys.getrefcount(handle) > before:
                    _drop_reference(handle)
            return result

        return run


def _is_in_graph(handle: Any) -> bool:
    return handle is not None and handle.is_for_engine


def _release(handles: list[weakref.ref[Any]]) -> None:
    for reference in handles:
        if (handle := reference()) is not None:
            handle.is_for_engine = False
            handle.release()


pack_references = _PackReferences()
_drop_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_DecRef", ctypes.pythonapi))
