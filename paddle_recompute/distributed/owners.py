"""Which rank owns a parameter or a shard: the one that updates it and keeps its state."""

from __future__ import annotations

from collections.abc import Sequence

import paddle


def owner_ranks(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that owns each thing: the largest first, to the rank that has least; of those that
    have equally much, to the one with the fewest things.

    Args:
        sizes: Of the things, in the same order on all ranks.
        num_ranks: Number of ranks.

    Returns:
        A number below `num_ranks` for each of `sizes`. No rank has more than the mean and the
        largest size together. Each rank has a thing if there are enough.
    """
    load = [(0, 0)] * num_ranks  # size and number of what each rank has
    found = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = load.index(min(load))
        size, count = load[rank]
        load[rank] = size + sizes[index], count + 1
        found[index] = rank
    return found


def parts_of_owners(
    parameters: Sequence[paddle.Tensor], num_ranks: int
) -> list[list[paddle.Tensor]]:
    """What each rank owns (`owner_ranks`).

    Parameters stay whole. LAMB takes norms over a whole parameter, and the kernel of RMSProp rounds
    a part of one differently, so parts of them would not have the bits of the replicated update.

    Args:
        parameters: Each once, in the same order on all ranks.
        num_ranks: Number of ranks.

    Returns:
        A list for each rank, in the order of `parameters`.
    """
    owners = owner_ranks([int(parameter.size) for parameter in parameters], num_ranks)
    parts: list[list[paddle.Tensor]] = [[] for _ in range(num_ranks)]
    for parameter, owner in zip(parameters, owners, strict=True):
        parts[owner].append(parameter)
    return parts
