"""Which calls of blocks cost the same, so that one of them is measured for all."""

from __future__ import annotations

from typing import Any

import paddle

INDICES = frozenset({"layer_idx", "layer_index", "layer_id", "layer_number", "block_idx"})
"""Attributes that number the blocks of a model and say nothing of what they cost."""


def structure_of(layer: paddle.nn.Layer) -> tuple[Any, ...]:
    """How `layer` is built: the same for blocks that differ in their values alone."""
    return tuple(
        (
            name,
            type(sublayer).__qualname__,
            sublayer.extra_repr(),
            sublayer.training,
            _settings(sublayer),
            tuple(
                (key, tuple(p.shape), str(p.dtype), p.stop_gradient)
                for key, p in sublayer.named_parameters(include_sublayers=False)
            ),
        )
        for name, sublayer in layer.named_sublayers(include_self=True)
    )


def _settings(layer: paddle.nn.Layer) -> tuple[Any, ...]:
    """Plain attributes: a probability, a stride."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(layer).items())
        if not name.startswith("_full_name")
        and isinstance(value, (int, float, bool, str))
        and not name.endswith("_name")
        and name not in INDICES
    )
