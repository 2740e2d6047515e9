"""What a plan does to the parts of a model, call by call, and how it is undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import paddle

from paddle_recompute.errors import SelectionError
from paddle_recompute.recompute._discarded import ticket_for
from paddle_recompute.recompute._fleet import FleetRecomputeLayer
from paddle_recompute.recompute._parts import is_cheap, named_parts
from paddle_recompute.recompute._segments import Segment
from paddle_recompute.recompute._turns import Turn, Turns
from paddle_recompute.recompute.function import Offload, RecomputeOptions
from paddle_recompute.recompute.layer import (
    RecomputedFunction,
    RecomputeLayer,
    WrappedLayer,
    wrap,
    wrap_scope,
)


@dataclass(frozen=True)
class Unit:
    """Consecutive calls that are treated together.

    Attributes:
        layers: Names of the Layers, in the order of the calls; one name: a call of its own.
        calls: For each of them, which of its calls in a step, from 0.
        offload: Where the inputs of a call of its own wait, as in `recompute`.
    """

    layers: tuple[str, ...]
    calls: tuple[int, ...]
    offload: Offload | None = None


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
    turns: dict[str, list[Turn]] = {}
    for unit in units:
        segment = Segment(unit.layers) if len(unit.layers) > 1 else None
        for position, (name, call) in enumerate(zip(unit.layers, unit.calls, strict=True)):
            own = turns.setdefault(name, [Turn(recomputed=False)] * num_calls[name])
            own[call] = Turn(
                segment=(segment, position) if segment is not None else None,
                offload=unit.offload,
            )
    options = RecomputeOptions(preserve_rng_state)
    for name, own in turns.items():
        wrap(layers[name], options, name, turns=Turns(tuple(own)))


PartOption = Literal["activation", "selective", "attention", "selective+attention"]
"""What of a block is recomputed: functions and activation Layers; all parts without a weight
matrix; Layers of attention; both.
"""


def parts_of_block(block: paddle.nn.Layer, option: PartOption) -> tuple[str, ...]:
    """The names, below `block`, of the parts that `option` recomputes; maybe none."""
    parts, _ = named_parts(block)
    attention = [name for name, part in parts.items() if _is_attention(part)]
    if option == "attention":
        return _outermost(attention)
    cheap = [
        name
        for name, part in parts.items()
        if is_cheap(part) and _is_single(part) and not hands_on(part)
    ]
    if option == "activation":
        cheap = [name for name in cheap if not _has_name(parts[name], "norm", "drop")]
        return tuple(cheap)
    if option == "selective":
        return tuple(cheap)
    outer = _outermost(attention)
    outside = [name for name in cheap if not any(name.startswith(f"{one}.") for one in outer)]
    return tuple(name for name in parts if name in {*outside, *outer})


def treat_parts(
    model: paddle.nn.Layer, names: Sequence[str], *, preserve_rng_state: bool = True
) -> None:
    """Recompute the parts `names` of `model`, each on its own; cheap ones give up their outputs."""
    parts, aliases = named_parts(model)
    owners = dict(model.named_sublayers(include_self=True))
    options = RecomputeOptions(preserve_rng_state)
    # Blocks may share a part, which is wrapped once; its outputs are given up in each of them.
    for first in dict.fromkeys(aliases.get(name, name) for name in names):
        wrap_part(owners, first, parts[first], options, None, is_cheap(parts[first]))
    for name in names:
        owner = name.rpartition(".")[0]
        if name in aliases and is_cheap(parts[aliases[name]]):
            wrap_scope(owners[aliases.get(owner, owner)])


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
        wrap(part, options, name, segment=segment, gives_up_outputs=cheap)
    else:
        setattr(owner, attribute, RecomputedFunction(part, options, name))


def offers_its_output(output: paddle.Tensor) -> bool:
    """Whether the part that made `output` computes it again for whoever would keep it."""
    return ticket_for(output) is not None


def is_treated(model: paddle.nn.Layer) -> str | None:
    """The name of the first part of `model` that is wrapped already; None if none is."""
    for name, part in named_parts(model)[0].items():
        if isinstance(part, (RecomputeLayer, RecomputedFunction, FleetRecomputeLayer)):
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


def _is_attention(part: Any) -> bool:
    return isinstance(part, paddle.nn.Layer) and _has_name(part, "attention")


def _has_name(part: Any, *words: str) -> bool:
    classes = [one.__name__.lower() for one in type(part).__mro__ if one.__module__ != "builtins"]
    return any(word in one for word in words for one in classes)


def _is_single(part: Any) -> bool:
    """A function, or a Layer without sublayers."""
    return not (isinstance(part, paddle.nn.Layer) and part.sublayers())


def hands_on(part: Any) -> bool:
    """Whether the part hands its input on, so that there is nothing to compute again."""
    nn = paddle.nn
    dropouts = (nn.Dropout, nn.Dropout2D, nn.Dropout3D, nn.AlphaDropout)
    return isinstance(part, nn.Identity) or (isinstance(part, dropouts) and not part.p)


def _outermost(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))
