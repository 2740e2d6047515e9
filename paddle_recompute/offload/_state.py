"""The ``state_dict`` of a Layer whose parameters are not on the device."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import paddle

from paddle_recompute.offload._away import away_of


def on_host(values: Any, name: str, dtype: Any) -> paddle.Tensor:
    """A tensor of the CPU that has `name`."""
    tensor = paddle.to_tensor(values, dtype=dtype, place=paddle.CPUPlace())
    tensor.name = name
    return tensor


def show_values_in_state_dict(layer: paddle.nn.Layer) -> None:
    """Let ``layer.state_dict()``, and that of a Layer that has it, hold copies of the parameters."""

    def show(state: MutableMapping[str, Any]) -> None:
        for key, value in state.items():
            away = away_of(value)
            if away is not None and not away.is_here:
                state[key] = on_host(away.numpy(), value.name, value.dtype)

    layer.register_state_dict_hook(show)
