"""Tensors whose memory comes and goes, while they stay the same Python objects."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import paddle
from paddle.base import framework

from paddle_recompute._paddle.guarded import gradient_of


def release_memory(tensor: paddle.Tensor) -> None:
    """Free the memory of `tensor`, which keeps its name, shape, dtype and flags.

    ``get_tensor()._clear`` (2.6, 3.x) is what Paddle's own sharding (stage 3) does with parameters.
    What an operator has saved for its backward is the same C++ tensor, so it is freed as well, and
    is back after `take_memory`. Can go when a tensor can leave its device publicly.
    """
    paddle.Tensor.get_tensor(tensor)._clear()  # guarded or not


def take_memory(tensor: paddle.Tensor, source: paddle.Tensor) -> None:
    """Give `tensor`, which may have none, the memory of the contiguous `source`.

    ``Tensor._share_buffer_to`` (2.6, 3.x). It does not raise ``inplace_version``: a backward that
    needs `tensor` goes on. Can go with `release_memory`.
    """
    source._share_buffer_to(tensor)


def leave_memory(tensor: paddle.Tensor) -> None:
    """Leave the memory of the parameter `tensor` to who else has it: graphs, views, ``detach``.

    ``Tensor._share_underline_tensor_to`` (2.6, 3.x) gives it another C++ tensor. It shares only
    what has memory, so that has some for the moment. Can go with `release_memory`.
    """
    other = twin_of(tensor, paddle.empty([1], tensor.dtype))
    other._share_underline_tensor_to(tensor)
    release_memory(tensor)


def has_memory(tensor: paddle.Tensor) -> bool:
    """Whether `tensor` has memory now: ``Tensor._is_initialized`` (2.6, 3.x), guarded or not."""
    return bool(paddle.Tensor._is_initialized(tensor))


def over_same_memory(tensor: paddle.Tensor) -> paddle.Tensor:
    """A new tensor over the memory of `tensor`, which keeps it when that of `tensor` is released.

    ``_new_shared_tensor`` and ``detach`` do not serve: they share the C++ tensor (3.3).
    """
    shared = paddle.empty([0], tensor.dtype)
    shared.get_tensor()._share_data_with(paddle.Tensor.get_tensor(tensor))
    return shared


def piece_of(memory: paddle.Tensor, begin: int, shape: Sequence[int]) -> paddle.Tensor:
    """A new tensor of `shape` over the elements of the flat `memory` from `begin` on.

    ``Tensor._slice`` and ``get_tensor()._set_dims`` (2.6, 3.x). An index and ``reshape`` do not
    serve: they copy with ``FLAGS_use_stride_kernel=0``, which our launcher sets for ranks on CPUs.
    Can go when a view can be had publicly whatever that flag says.
    """
    size = math.prod(shape)
    if not size:
        return paddle.empty(shape, memory.dtype)
    piece = memory._slice(begin, begin + size)
    piece.get_tensor()._set_dims([*shape])
    return over_same_memory(piece)


def twin_of(parameter: paddle.Tensor, memory: paddle.Tensor) -> paddle.Tensor:
    """Another parameter of the same name, dtype and flags, over `memory`.

    ``EagerParamBase`` (2.6, 3.x), because a plain tensor of 2.6 takes no attributes.
    """
    twin = framework.EagerParamBase(
        shape=list(parameter.shape), dtype=parameter.dtype, name=parameter.name
    )
    twin.stop_gradient = parameter.stop_gradient
    take_memory(twin, memory)
    return twin


def take_gradient(parameter: paddle.Tensor) -> paddle.Tensor | None:
    """The gradient of `parameter`, which has none afterwards.

    ``clear_gradient`` frees the memory of every tensor that is a ``detach`` of the gradient (2.6,
    3.x), so the memory is handed to a new tensor first.
    """
    gradient = gradient_of(parameter)
    if gradient is None:
        return None
    if not gradient.is_contiguous():
        gradient = gradient.contiguous()
    taken = over_same_memory(gradient)
    set_gradient(parameter, None)
    return taken


def set_gradient(parameter: paddle.Tensor, gradient: paddle.Tensor | None) -> None:
    """Make `gradient` that of `parameter`, of whichever dtype; None: no gradient."""
    framework.EagerParamBase.clear_gradient(parameter, False)
    if gradient is not None:
        parameter.grad = gradient


def set_values_of(tensor: paddle.Tensor, *args: Any) -> Any:
    """``Tensor.set_value`` of the class, where the object has another one."""
    return type(tensor).set_value(tensor, *args)
