"""The ``state_dict`` of a Layer whose parameters are not on the device."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import MutableMapping
from typing import Any

import paddle

from paddle_recompute._paddle.released_memory import set_values_of, twin_of
from paddle_recompute.offload._offloaded_tensor import OffloadedTensor, offloaded_tensor_of
from paddle_recompute.offload._resident import chains_of


def on_host(values: Any, name: str, dtype: Any) -> paddle.Tensor:
    """A tensor of the CPU that has `name`."""
    tensor = paddle.to_tensor(values, dtype=dtype, place=paddle.CPUPlace())
    tensor.name = name
    return tensor


def show_values_in_state_dict(layer: paddle.nn.Layer) -> None:
    """Let ``state_dict()`` of `layer`, and of its owners, hold copies of the parameters."""

    def show(state: MutableMapping[str, Any]) -> None:
        for key, value in state.items():
            offloaded = offloaded_tensor_of(value)
            if offloaded is not None and _keeps_nothing.get():
                offloaded.numpy()  # an exchange between ranks
            elif offloaded is not None:
                state[key] = _copy_of(value, offloaded)

    layer.register_state_dict_hook(show)


_keeps_nothing = contextvars.ContextVar("keeps_nothing", default=False)


def take_part_in_state_dict(model: paddle.nn.Layer) -> None:
    """To be called while other ranks call ``model.state_dict()``: with ``offload="ranks"`` they
    get parameters that this rank owns.
    """
    if not any(chain.is_spread for chain in chains_of(model)):
        return
    token = _keeps_nothing.set(True)
    try:
        model.state_dict()
    finally:
        _keeps_nothing.reset(token)


def _copy_of(parameter: paddle.Tensor, offloaded: OffloadedTensor) -> paddle.Tensor:
    """Its values; ``set_value`` of the copy sets the parameter too, as with a plain Layer."""
    copy = twin_of(parameter, on_host(offloaded.numpy(), parameter.name, parameter.dtype))
    alone = weakref.ref(copy)  # Paddle 3.3 never frees a tensor with an attribute that holds it

    def set_value(value: Any) -> None:
        set_values_of(alone(), value)
        parameter.set_value(value)

    copy.set_value = set_value
    return copy
