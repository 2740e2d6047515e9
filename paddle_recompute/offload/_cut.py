"""Which parameters are offloaded, and where to cut a chain so that the largest shard is small."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import paddle

from paddle_recompute._paddle.layers import own_parameters, statistics_among_parameters
from paddle_recompute.errors import ConfigError, OffloadError
from paddle_recompute.offload._chain import Chain
from paddle_recompute.offload._offloaded_tensor import (
    OffloadedTensor,
    offload_parameter,
    offloaded_tensor_of,
)
from paddle_recompute.offload._ranks import Carrier
from paddle_recompute.offload._refused_methods import refuse_methods
from paddle_recompute.recompute import MakeSlot


def num_bytes(layer: paddle.nn.Layer) -> int:
    """Of the parameters of `layer`."""
    return sum(int(p.size) * int(p.element_size()) for p in layer.parameters())


def send_away(
    layer: paddle.nn.Layer,
    offloaded: dict[int, OffloadedTensor],
    make_slot: MakeSlot,
    but: Collection[int] = (),
) -> None:
    """Take the parameters of `layer` off the device, and add each to `offloaded` by its id.

    Args:
        layer: The statistics of its BatchNorms stay: kernels write to them without a trace.
        offloaded: Those that have left before, which are left alone.
        make_slot: Where they go.
        but: The ids of parameters that stay.

    Raises:
        OffloadError: Another chain has one of the parameters.
    """
    refuse_methods()
    for parameter in _travelling(layer):
        if id(parameter) in offloaded or id(parameter) in but:
            continue
        before = offloaded_tensor_of(parameter)
        if before is not None:
            if before.owner() is not None:
                raise OffloadError(
                    f"{parameter.name} of {type(layer).__name__} is offloaded already, with "
                    "another chain of Layers; a Layer can be in one. Put the Layers of both into "
                    "one chain, or leave what they share out of both"
                )
            before.load_permanently()  # that chain is gone
        offloaded[id(parameter)] = offload_parameter(parameter, make_slot())


@contextlib.contextmanager
def sent_away() -> Iterator[dict[int, OffloadedTensor]]:
    """A dict for `send_away`; if the body fails, what it has taken comes back to the device."""
    offloaded: dict[int, OffloadedTensor] = {}
    try:
        yield offloaded
    except BaseException:
        for offloaded_tensor in offloaded.values():
            offloaded_tensor.load_permanently()
        raise


def chain_of(
    layers: Sequence[paddle.nn.Layer],
    num_shards: int,
    offloaded: dict[int, OffloadedTensor],
    make_slot: MakeSlot,
    *,
    prefetch: int = 1,
    names: Sequence[str] | None = None,
    carrier: Carrier | None = None,
) -> tuple[Chain, list[range]]:
    """`layers`, whose parameters are in `offloaded`, in shards of which the largest is small.

    Args:
        layers: In the order of the forward.
        num_shards: Into how many shards they are cut.
        offloaded: From `send_away`.
        make_slot: As in `send_away`.
        prefetch: As in `Chain`.
        names: Of the layers, for messages; None: their numbers.
        carrier: As in `Chain`.

    Returns:
        The chain, and the places of each shard's Layers.

    Raises:
        ConfigError: There are more shards than Layers.
    """
    if num_shards > len(layers):
        raise ConfigError(
            f"num_shards is {num_shards}, and there are {len(layers)} Layers; a shard has at least "
            "one"
        )
    ranges = cut([num_bytes(layer) for layer in layers], num_shards)
    names = names or [f"Layer {index}" for index in range(len(layers))]
    groups = [
        (f"shard {number} of {num_shards} ({names[part[0]]} to {names[part[-1]]})", own)
        for number, (part, own) in enumerate(
            zip(ranges, _owned(layers, ranges, offloaded), strict=True)
        )
    ]
    chain = Chain(groups, offloaded.values(), make_slot, prefetch=prefetch, carrier=carrier)
    return chain, ranges


def _owned(
    layers: Sequence[paddle.nn.Layer],
    ranges: Sequence[range],
    offloaded: dict[int, OffloadedTensor],
) -> list[list[OffloadedTensor]]:
    """The parameters that each shard has for itself; those of several come back for good."""
    users: dict[int, set[int]] = {}
    for number, part in enumerate(ranges):
        for place in part:
            for parameter in _travelling(layers[place]):
                users.setdefault(id(parameter), set()).add(number)
    found: list[list[OffloadedTensor]] = [[] for _ in ranges]
    for key, offloaded_tensor in offloaded.items():
        if len(users[key]) == 1:
            found[users[key].pop()].append(offloaded_tensor)
        else:
            offloaded_tensor.load_permanently()
    return found


def _travelling(layer: paddle.nn.Layer) -> list[paddle.Tensor]:
    statistics = {
        id(own_parameters(part)[name])
        for part in layer.sublayers(include_self=True)
        for name in statistics_among_parameters(part)
    }
    return [p for p in layer.parameters() if id(p) not in statistics and p.size]


def cut(sizes: Sequence[int], num_shards: int) -> list[range]:
    """`num_shards` consecutive, non-empty ranges of the indices of `sizes`.

    Args:
        sizes: The bytes of each Layer.
        num_shards: At most ``len(sizes)``.
    """
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        limit = (low + high) // 2
        if len(_ranges(sizes, limit, 1)) <= num_shards:
            high = limit
        else:
            low = limit + 1
    return _ranges(sizes, low, num_shards)


def _ranges(sizes: Sequence[int], limit: int, num_shards: int) -> list[range]:
    """Ranges of at most `limit`: `num_shards` of them, or as many more as it takes."""
    ranges: list[range] = []
    begin, filled = 0, 0
    for index, size in enumerate(sizes):
        # What is left must be enough for one Layer in each shard that is left.
        must_cut = len(sizes) - index == num_shards - len(ranges) - 1
        if index > begin and (filled + size > limit or must_cut):
            ranges.append(range(begin, index))
            begin, filled = index, 0
        filled += size
    ranges.append(range(begin, len(sizes)))
    return ranges
