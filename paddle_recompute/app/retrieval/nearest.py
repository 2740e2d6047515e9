"""The rows of a pool with the largest inner products, tile by tile."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LAST_ROW = 2**32 - 1


def top_of_tiles(
    query: NDArray[np.floating[Any]], tiles: Iterable[NDArray[np.floating[Any]]], top_k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The largest inner products, and their rows.

    Args:
        query: ``[n, dim]``.
        tiles: Blocks ``[rows, dim]`` of the pool, in order.
        top_k: How many; fewer if the pool has fewer rows.

    Returns:
        Scores, float32, and rows, int64: ``[n, top_k]``, the largest first; of equal scores the
        smaller row first.
    """
    query = query.astype(np.float64)
    keys = np.empty((len(query), 0), np.int64)
    least = np.full((len(query), 1), -np.inf, np.float32)
    first = 0
    for tile in tiles:
        # Summed in float64 and rounded: equal rows have equal scores in every tile. 0 has one sign.
        found = (query @ tile.astype(np.float64).T).astype(np.float32) + np.float32(0)
        if not first and found.shape[1] > top_k:
            bound = np.partition(found, -top_k, axis=1)[:, -top_k, None]
            least = np.nextafter(bound, np.float32(-np.inf))
        # Few are above what is kept; sorting all of them would take longer than the product.
        row, column = np.nonzero(found > least)
        place = np.arange(len(row)) - np.searchsorted(row, row)
        better = np.full((len(query), place.max(initial=-1) + 1), np.iinfo(np.int64).min)
        better[row, place] = (_ordered(found[row, column]) << 32) + (_LAST_ROW - first - column)
        keys = np.concatenate([keys, better], axis=1)
        first += len(tile)
        if keys.shape[1] >= top_k:
            keys = np.partition(keys, -top_k, axis=1)[:, -top_k:]
            least = _scores(keys[:, :1])
    keys = np.sort(keys, axis=1)[:, ::-1]
    return _scores(keys), _LAST_ROW - (keys & _LAST_ROW)


def _scores(keys: NDArray[np.int64]) -> NDArray[np.float32]:
    scores = _ordered((keys >> 32).astype(np.int32).view(np.float32)).astype(np.int32)
    return scores.view(np.float32)


def _ordered(numbers: NDArray[np.float32]) -> NDArray[np.int64]:
    """Integers of 32 bits in the order of the numbers. Twice, it gives the same bits again."""
    bits = numbers.view(np.int32)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
