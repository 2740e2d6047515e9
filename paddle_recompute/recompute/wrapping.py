"""Wrap parts of a model, call by call, as a plan says; undo the wrapping."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import paddle

from paddle_recompute.errors import SelectionError
from paddle_recompute.recompute._fleet import FleetRecomputeLayer
from paddle_recompute.recompute._parts import named_parts
from paddle_recompute.recompute.function import RecomputeOptions
from paddle_recompute.recompute.kept import KeptFunction, keeping
from paddle_recompute.recompute.layer import (
    Planned,
    RecomputedFunction,
    RecomputeLayer,
    WrappedLayer,
    replace_class,
    wrap,
)
from paddle_recompute.recompute.program.marked_call import Mark

WRAPPED = (RecomputeLayer, RecomputedFunction, FleetRecomputeLayer)
"""The parts that are recomputed."""


def wrap_calls(
    model: paddle.nn.Layer,
    calls: Iterable[tuple[Any, ...]],
    num_calls: Mapping[str, int],
    *,
    preserve_rng_state: bool = True,
) -> None:
    """Recompute `calls` and no others.

    Args:
        model: Its Layers are wrapped in place.
        calls: Name of a Layer, and which of its calls in a step, from 0; a third element where
            `keep` keeps parts of it.
        num_calls: How often each Layer is called in a step.
        preserve_rng_state: As in `recompute`.
    """
    layers = dict(model.named_sublayers(include_self=True))
    plans: dict[str, list[Planned]] = {name: [None] * num for name, num in num_calls.items()}
    for name, call, *keeps in calls:
        plans[name][call] = bool(keeps)
    options = RecomputeOptions(preserve_rng_state)
    for name, plan in plans.items():
        if plan.count(None) < len(plan):
            wrap(layers[name], options, name, plan=tuple(plan))


def wrap_part(
    owners: Mapping[str, paddle.nn.Layer],
    name: str,
    part: Any,
    options: RecomputeOptions,
    mark: Mark,
) -> None:
    """Wrap the Layer or the function `part`, called `name`, in the Layer that has it."""
    if isinstance(part, paddle.nn.Layer):
        wrap(part, options, name, mark=mark)
    else:
        owner_name, _, attribute = name.rpartition(".")
        setattr(owners[owner_name], attribute, RecomputedFunction(part, options, name, mark))


def keep_part(owners: Mapping[str, paddle.nn.Layer], name: str) -> None:
    """Keep the Layer, or the method or function of a Layer, called `name`."""
    owner_name, _, attribute = name.rpartition(".")
    owner = owners[owner_name]
    if name in owners:
        replace_class(owners[name], keeping("__call__"))
    elif attribute in vars(owner):
        setattr(owner, attribute, KeptFunction(getattr(owner, attribute)))
    else:
        replace_class(owner, keeping(attribute))


def is_kept(parts: Mapping[str, Any], name: str) -> bool:
    """Whether `keep_part` has been called for `name`, one of `parts` or a method of one."""
    if name in parts:
        return isinstance(parts[name], KeptFunction | keeping("__call__"))
    owner_name, _, attribute = name.rpartition(".")
    return isinstance(parts[owner_name], keeping(attribute))


def first_wrapped_part(model: paddle.nn.Layer) -> str | None:
    """The name of the first part of `model` that is already wrapped; None: no part is."""
    for name, part in named_parts(model)[0].items():
        if isinstance(part, WRAPPED):
            return name
    return None


def wrapped_layers(model: paddle.nn.Layer) -> dict[str, paddle.nn.Layer]:
    """The sublayers of `model` that are recomputed as a whole, by name."""
    return {
        name: layer
        for name, layer in model.named_sublayers(include_self=True)
        if isinstance(layer, RecomputeLayer | FleetRecomputeLayer)
    }


def undo_recompute(model: paddle.nn.Layer) -> None:
    """Undo all wrapping of Layers and functions of `model`."""
    for layer in model.sublayers(include_self=True):
        for attribute, value in list(vars(layer).items()):
            if isinstance(value, RecomputedFunction | KeptFunction):
                setattr(layer, attribute, value.function)
        while isinstance(layer, WrappedLayer):
            if isinstance(layer, FleetRecomputeLayer):
                raise SelectionError("a Layer under fleet's recompute cannot be planned")
            layer.unwrap()


def passes_input_through(part: Any) -> bool:
    """Whether the part returns its input, so that there is nothing to recompute."""
    nn = paddle.nn
    dropouts = (nn.Dropout, nn.Dropout2D, nn.Dropout3D, nn.AlphaDropout)
    return isinstance(part, nn.Identity) or (isinstance(part, dropouts) and not part.p)
