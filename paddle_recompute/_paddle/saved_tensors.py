"""Saved-tensor hooks, and tensors that share memory with what an operator saved."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import paddle
from paddle.base import core

from paddle_recompute._paddle.amp import amp_state, amp_state_of
from paddle_recompute._paddle.layers import is_initialized
from paddle_recompute._paddle.version import paddle_version


def shares_memory(tensor: paddle.Tensor) -> paddle.Tensor:
    """A new tensor over the same memory, with no gradient history and an identity of its own.

    ``Tensor.detach`` does not serve: it shares the C++ tensor itself, and on 2.6 the engine moves
    the memory *out of* the tensor that an unpack hook returns, which would empty the original.
    ``_new_shared_tensor`` exists from 3.0; on 2.6 ``get_tensor()._share_data_with`` does the same:
    it takes strides and offset along, which ``_share_buffer_to`` leaves out. Can go when a public
    shallow copy exists in every supported version.
    """
    if hasattr(tensor, "_new_shared_tensor"):
        shared = tensor._new_shared_tensor().detach()
    else:
        shared = core.eager.Tensor(
            tensor.dtype, tensor.shape, "", core.VarDesc.VarType.LOD_TENSOR, False
        )
        shared.get_tensor()._share_data_with(tensor.get_tensor())
    shared.stop_gradient = tensor.stop_gradient
    return shared


Layout = tuple[tuple[int, ...], int]
"""Strides (in elements) of a tensor, and its offset in its memory (in bytes)."""


def layout_of(tensor: paddle.Tensor) -> Layout | None:
    """How `tensor` lies in its memory (``strides``, ``offset``; 2.6, 3.x); None if it has none.

    ``nn.LSTM`` in eval mode saves a tensor without memory, ``paddle.einsum`` an empty one: 3.3 and
    2.6 end the process where the strides of such a tensor are asked.
    """
    has_elements = is_initialized(tensor) and tensor.size > 0
    return (tuple(tensor.strides), tensor.offset) if has_elements else None


def with_layout(tensor: paddle.Tensor, layout: Layout | None) -> paddle.Tensor:
    """`tensor`, or a copy of it that lies in its memory as `layout` says.

    The engine (2.6, 3.x) takes the bare memory from what an unpack hook returns, and reads it with
    the strides and the offset of the tensor that the operator had saved. Can go when the engine
    takes the tensor itself.
    """
    if layout is None or layout_of(tensor) in (None, layout):
        return tensor
    strides, offset = layout
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    with paddle.no_grad(), amp_state_of(replace(amp_state(), level=core.AmpLevel.O0)):
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


PACK_LEAKS_A_REFERENCE = paddle_version() < (3, 0, 0)
"""Paddle 2.6 never drops the reference that a pack hook returns: each saved tensor would leak."""


def give_back_pack_references(tickets: list[Any]) -> None:
    """Drop the reference to each of `tickets` that Paddle 2.6 forgets; empties the list.

    To be called when the recording is over and the graph holds references of its own. A ticket
    that a PyLayer saved has one holder and none too many, so it is left alone. Can go with 2.6.
    """
    while tickets:
        ticket = tickets.pop()
        own = 2  # the name `ticket`, and the argument of getrefcount
        if sys.getrefcount(ticket) - own >= 2:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(ticket))
