"""Batches in which no two pairs share an equal query or an equal positive."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paddle_recompute.app.data.pairs import Pair

Rows = npt.NDArray[np.int64]


def text_numbers(pairs: Sequence[Pair]) -> Rows:
    """``[pairs, 2]``: numbers of query and positive; equal texts of a side have equal numbers."""
    numbers: dict[tuple[int, str], int] = {}
    rows = [
        [numbers.setdefault(text, len(numbers)) for text in enumerate((pair.query, pair.positive))]
        for pair in pairs
    ]
    return np.array(rows, np.int64).reshape(len(pairs), 2)


def distinct_batches(order: Rows, numbers: Rows, size: int) -> Rows:
    """Cut `order` into batches of `size` pairs without an equal number: ``[batches, size]``.

    A pair that has a text in common with its batch waits for the next one, where it comes before
    the pairs that are later in `order`. So the batches hold nearly the order. The rest, which fills
    no batch, is left out. The time grows with the pairs, and with the batches times the texts that
    pairs wait for.

    Args:
        order: Pairs, each once.
        numbers: As from `text_numbers`.
        size: Pairs per batch.
    """
    stream, texts = deque(order.tolist()), numbers.tolist()
    waiting: dict[int, deque[int]] = {}  # by the text that was in the batch already
    found: list[list[int]] = []
    while True:
        batch: list[int] = []
        used: set[int] = set()
        for text in list(waiting):
            if len(batch) < size and used.isdisjoint(texts[waiting[text][0]]):
                batch.append(waiting[text].popleft())
                used.update(texts[batch[-1]])
                if not waiting[text]:
                    del waiting[text]
        while stream and len(batch) < size:
            pair = stream.popleft()
            if shared := used.intersection(texts[pair]):
                waiting.setdefault(min(shared), deque()).append(pair)
            else:
                batch.append(pair)
                used.update(texts[pair])
        if len(batch) < size:
            return np.array(found, np.int64).reshape(len(found), size)
        found.append(batch)
