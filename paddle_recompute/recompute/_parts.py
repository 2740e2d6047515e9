"""The parts of a model by name: sublayers, and the functions that Layers hold as attributes."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import paddle

from paddle_recompute._paddle.layers import children_of
from paddle_recompute.recompute.layer import RecomputedFunction


def named_parts(model: paddle.nn.Layer) -> tuple[dict[str, Any], dict[str, str]]:
    """Sublayers, and the functions that Layers hold as attributes, by name.

    A Layer that has several names (a tower that is shared) stands under the first of them, as in
    ``named_sublayers``; its other names, and those of its parts, are returned as aliases of it.
    """
    parts: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, layer in _walk(model, "", ()):
        first = first_names.setdefault(id(layer), name)
        functions = [
            attribute
            for attribute, value in vars(layer).items()
            if isinstance(value, _FUNCTIONS) and not attribute.startswith("_")
        ]
        if first != name:
            aliases[name] = first
            aliases.update({join(name, key): join(first, key) for key in functions})
            continue
        if name:
            parts[name] = layer
        parts.update({join(name, key): getattr(layer, key) for key in functions})
    return parts, aliases


def _walk(
    layer: paddle.nn.Layer, name: str, path: tuple[int, ...]
) -> Iterator[tuple[str, paddle.nn.Layer]]:
    """`layer` and all Layers below it; a shared Layer once for each of its names."""
    yield name, layer
    for child_name, child in children_of(layer):
        if id(child) not in path:
            yield from _walk(child, join(name, child_name), (*path, id(layer)))


def join(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, RecomputedFunction)


def is_cheap(part: Any) -> bool:
    """Whether the part has no weight matrix, so that its recomputation costs little."""
    if not isinstance(part, paddle.nn.Layer):
        return True
    return all(len(parameter.shape) < 2 for parameter in part.parameters())
