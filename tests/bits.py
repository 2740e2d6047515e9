"""What runs leave behind, compared to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle


def values_of(layer: paddle.nn.Layer) -> dict[str, np.ndarray]:
    """All parameters and buffers, on the host."""
    return {name: one.numpy().copy() for name, one in layer.state_dict().items()}


def assert_same_bits(one: Any, other: Any, where: str = "") -> None:
    """Numbers, texts, arrays and tensors in dicts, lists and tuples are the same."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), f"other names:{where}"
        for name, value in one.items():
            assert_same_bits(value, other[name], f"{where} {name}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), f"another length:{where}"
        for number, (first, second) in enumerate(zip(one, other, strict=True)):
            assert_same_bits(first, second, f"{where} {number}")
    else:
        first, second = np.asarray(one), np.asarray(other)
        assert first.dtype == second.dtype and np.array_equal(first, second), f"differs:{where}"
