"""Which rank owns which of several things, where each has one owner."""

from __future__ import annotations

from collections.abc import Sequence


def shared_out(sizes: Sequence[int], num_ranks: int) -> list[int]:
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
