"""What a plan does to the parts of a model, call by call, and how it is undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_recompute.errors import SelectionError
from paddle_recompute.recompute._fleet import FleetRecomputeLayer
from paddle_recompute.recompute._parts import named_parts
from paddle_recompute.recompute._segments import Segment
from paddle_recompute.recompute.function import RecomputeOptions
from paddle_recompute.recompute.layer import (
    RecomputedFunction,
    RecomputeLayer,
    Turn,
    WrappedLayer,
    wrap,
    wrap_scope,
)

WRAPPED = (RecomputeLayer, RecomputedFunction, FleetRecomputeLayer)
"""The parts that are recomputed."""


@dataclass(frozen=True)
class Unit:
    """Consecutive calls that are treated together.

    Attributes:
        layers: Names of the Layers, in the order of the calls; one name: a call of its own.
        calls: For each of them, which of its calls in a step, from 0.
    """

    layers: tuple[str, ...]
    calls: tuple[int, ...]


def treat_calls(
    model: paddle.nn.Layer,
    units: Sequence[Unit],
    num_calls: Mapping[str, int],
    *,
    preserve_rng_state: bool = True,
) -> None:
    """Recompute the calls of `units` and no others.

    Args:
        model: Its Layers are wrapped in place.
        units: What is recomputed whole.
        num_calls: How often each Layer is called in a step.
        preserve_rng_state: As in `recompute`.
    """
    layers = dict(model.named_sublayers(include_self=True))
    turns: dict[str, list[Turn | None]] = {name: [None] * num for name, num in num_calls.items()}
    for unit in units:
        segment = Segment(unit.layers) if len(unit.layers) > 1 else None
        for position, (name, call) in enumerate(zip(unit.layers, unit.calls, strict=True)):
            turns[name][call] = Turn((segment, position) if segment is not None else None)
    options = RecomputeOptions(preserve_rng_state)
    for name, own in turns.items():
        if any(own):
            wrap(layers[name], options, name, turns=tuple(own), is_planned=True)


def wrap_part(
    owners: Mapping[str, paddle.nn.Layer],
    name: str,
    part: Any,
    options: RecomputeOptions,
    segment: tuple[Segment, int] | None,
    cheap: bool,
) -> None:
    """Wrap the Layer or the function `part`, called `name`, in the Layer that has it."""
    owner_name, _, attribute = name.rpartition(".")
    owner = owners[owner_name]
    if cheap:
        wrap_scope(owner)
    if isinstance(part, paddle.nn.Layer):
        wrap(part, options, name, turns=(Turn(segment, cheap),))
    else:
        setattr(owner, attribute, RecomputedFunction(part, options, name))


def is_treated(model: paddle.nn.Layer) -> str | None:
    """The name of the first part of `model` that is wrapped already; None if none is."""
    for name, part in named_parts(model)[0].items():
        if isinstance(part, WRAPPED):
            return name
    return None


def undo_recompute(model: paddle.nn.Layer) -> None:
    """Undo all wrapping of Layers and functions of `model`."""
    for layer in model.sublayers(include_self=True):
        for attribute, value in list(vars(layer).items()):
            if isinstance(value, RecomputedFunction):
                setattr(layer, attribute, value.function)
        while isinstance(layer, WrappedLayer):
            if isinstance(layer, FleetRecomputeLayer):
                raise SelectionError("a Layer under fleet's recompute cannot be planned")
            layer.unwrap()


def hands_on(part: Any) -> bool:
    """Whether the part hands its input on, so that there is nothing to compute again."""
    nn = paddle.nn
    dropouts = (nn.Dropout, nn.Dropout2D, nn.Dropout3D, nn.AlphaDropout)
    return isinstance(part, nn.Identity) or (isinstance(part, dropouts) and not part.p)
