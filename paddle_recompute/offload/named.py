"""`offload_layers`: named sublayers of any model, called in turn, as the shards of a chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import paddle

from paddle_recompute._paddle.layers import own_parameters
from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute.errors import ConfigError, OffloadError, SelectionError
from paddle_recompute.offload import _shard_call
from paddle_recompute.offload._chain import Chain
from paddle_recompute.offload._cut import chain_of, send_away, sent_away
from paddle_recompute.offload._ranks import Carrier, RankSlot
from paddle_recompute.offload._resident import chains_of
from paddle_recompute.offload._state import show_values_in_state_dict
from paddle_recompute.offload.optimizer import MakeOptimizer, OffloadOptimizer
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import (
    OFFLOADS,
    InputStorage,
    WrappedLayer,
    layers_matching,
    replace_class,
    slots,
)


@dataclass(frozen=True)
class OffloadReport:
    """What `offload_layers` did; ``str(report)`` is a readable table.

    Attributes:
        shards: The names of the Layers of each shard, in the order of the forward.
        num_bytes: The bytes of the parameters of each.
        place: Where they are: ``"host"``, ``"disk"`` or ``"ranks"``.
    """

    shards: tuple[tuple[str, ...], ...]
    num_bytes: tuple[int, ...]
    place: str

    def __str__(self) -> str:
        total = format_bytes(sum(self.num_bytes))
        place = "ranks, each shard with one" if self.place == "ranks" else self.place
        lines = [
            f"offload: {total} of parameters, with their gradients and optimizer state, to the "
            f"{place}, in {len(self.shards)} shards of at most "
            f"{format_bytes(max(self.num_bytes))}"
        ]
        for names, size in zip(self.shards, self.num_bytes, strict=True):
            shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            lines.append(f"  {shown}: {format_bytes(size)}")
        return "\n".join(lines)


class OffloadedLayer(WrappedLayer):
    """A Layer whose parameters are on the device while it computes; each call is recomputed."""

    _added: ClassVar[tuple[str, ...]] = ("_offload_chain", "_offload_shard", "_offload_inputs")
    _offload_chain: Chain
    _offload_shard: int
    _offload_inputs: InputStorage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The Layer's own call, with its shard on the device."""
        if not is_dygraph():
            raise OffloadError(
                "an offloaded Layer cannot be called in a Program; use mode: dygraph"
            )
        return _shard_call.run(
            self._offload_chain,
            self._offload_shard,
            super().__call__,
            args,
            kwargs=kwargs,
            storage=self._offload_inputs,
        )

    def unwrap(self) -> paddle.nn.Layer:
        """Refused: the parameters would stay where they are."""
        raise OffloadError(
            "an offloaded Layer cannot be unwrapped; build the model anew and load its state_dict()"
        )


def offload_layers(model: paddle.nn.Layer, config: RecomputeConfig) -> OffloadReport:
    """Take the Layers that `config` selects off the device, in shards, as `OffloadSequential` does.

    The Layers may be called by any code of the model, with any arguments. They should be called one
    after the other, in the order of their names: the shard that comes next is brought ahead. Each
    call is recomputed in the backward.

    Args:
        model: Any Layer. Its selected sublayers change in place; all else stays on the device.
        config: ``checkpoints`` selects the Layers, ``offload_parameters`` says where their
            parameters, gradients and optimizer state are, ``num_shards`` into how many shards they
            are cut. Their inputs wait there too, but for ``"ranks"``.

    Returns:
        The shards.

    Raises:
        SelectionError: Nothing is selected, or what is not a Layer, or is wrapped already.
        ConfigError: There are more shards than Layers, or no place is given.
        OffloadError: The file cannot be made, or the disk is full.
    """
    place = config.offload_parameters
    if place == "none":
        raise ConfigError("offload_parameters is none; set it to host, disk or ranks")
    names = layers_matching(model, config.checkpoints)
    found = dict(model.named_sublayers())
    layers = [found[name] for name in names]
    _check_not_wrapped(names, layers)
    carrier = Carrier() if place == "ranks" else None
    make_slot = RankSlot if place == "ranks" else slots(place, None)
    others = _others(model, layers)
    with sent_away() as offloaded:
        for layer in layers:
            send_away(layer, offloaded, make_slot, but=others)
        chain, ranges = chain_of(
            layers, config.num_shards, offloaded, make_slot, names=names, carrier=carrier
        )
    shards = tuple(tuple(names[part.start : part.stop]) for part in ranges)
    for number, part in enumerate(ranges):
        for layer in layers[part.start : part.stop]:
            layer._offload_chain = chain
            layer._offload_shard = number
            layer._offload_inputs = OFFLOADS[None if place == "ranks" else place]
            replace_class(layer, OffloadedLayer)
    show_values_in_state_dict(model)
    return OffloadReport(shards, tuple(shard.num_bytes for shard in chain.shards), place)


def offloaded_optimizer(
    model: paddle.nn.Layer, parameters: list[paddle.Tensor], make: MakeOptimizer
) -> OffloadOptimizer | None:
    """The optimizer of a model with offloaded Layers; None: it has none.

    Args:
        model: `offload_layers` changed it, or it has an `OffloadSequential`.
        parameters: All that is trained, also besides the model.
        make: Makes a Paddle optimizer over some of them.
    """
    chains = chains_of(model)
    return OffloadOptimizer(chains, parameters, make) if chains else None


def _others(model: paddle.nn.Layer, layers: list[paddle.nn.Layer]) -> set[int]:
    """The parameters that Layers outside of `layers` use."""
    inside = {id(part) for layer in layers for part in layer.sublayers(include_self=True)}
    return {
        id(parameter)
        for layer in model.sublayers(include_self=True)
        if id(layer) not in inside
        for parameter in own_parameters(layer).values()
        if parameter is not None
    }


def _check_not_wrapped(names: list[str], layers: list[paddle.nn.Layer]) -> None:
    for name, layer in zip(names, layers, strict=True):
        if isinstance(layer, WrappedLayer):
            raise SelectionError(
                f"checkpoints selects '{name}', which is wrapped already; an offloaded "
                "Layer is recomputed by itself"
            )
