"""Where to cut a chain, so that the largest shard is as small as it can be."""

from __future__ import annotations

from collections.abc import Sequence


def cut(sizes: Sequence[int], num_shards: int) -> list[range]:
    """`num_shards` consecutive, non-empty ranges of the indices of `sizes`.

    Args:
        sizes: The bytes of each Layer.
        num_shards: At most ``len(sizes)``.
    """
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        limit = (low + high) // 2
        if _num_needed(sizes, limit) <= num_shards:
            high = limit
        else:
            low = limit + 1
    return _ranges(sizes, low, num_shards)


def _num_needed(sizes: Sequence[int], limit: int) -> int:
    count, filled = 1, 0
    for size in sizes:
        if filled + size > limit:
            count, filled = count + 1, 0
        filled += size
    return count


def _ranges(sizes: Sequence[int], limit: int, num_shards: int) -> list[range]:
    """Shards of at most `limit`, none of them empty."""
    ranges, begin, filled = [], 0, 0
    for index, size in enumerate(sizes):
        # What is left must be enough for one Layer in each shard that is left.
        must_cut = len(sizes) - index == num_shards - len(ranges) - 1
        if index > begin and (filled + size > limit or must_cut):
            ranges.append(range(begin, index))
            begin, filled = index, 0
        filled += size
    ranges.append(range(begin, len(sizes)))
    return ranges
