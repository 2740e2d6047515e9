"""Approximate search: an index of faiss in memory proposes the nearest texts; scores are exact."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_recompute.app.retrieval.index import Index
from paddle_recompute.errors import DataError, DependencyError

_TRAINED_ON = 1 << 18
"""Vectors from which faiss learns its clusters or codes, at most."""


def require_faiss() -> types.ModuleType:
    """The package `faiss`.

    Raises:
        DependencyError: It is not installed.
    """
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it tells which CPU it is made for
    try:
        import faiss
    except ModuleNotFoundError:
        raise DependencyError(
            "--faiss needs the package faiss, which is not installed; pip install faiss-cpu (or "
            "'paddle-recompute[search]'). Without --faiss the search is exact"
        ) from None
    module: types.ModuleType = faiss
    return module


class Approximate:
    """An index of faiss over the vectors of an `Index`.

    Args:
        index: The texts.
        choice: The string of ``faiss.index_factory``; behind a semicolon, parameters of the search,
            as in ``IVF256,Flat;nprobe=16``.
        progress: Called with (texts added, texts in all).

    Raises:
        DataError: faiss does not know `choice`, or refuses these vectors.
        DependencyError: The package `faiss` is not installed.
    """

    def __init__(self, index: Index, choice: str, progress: Callable[[int, int], object]) -> None:
        faiss, self._index, self._choice = require_faiss(), index, choice
        factory, _, parameters = choice.partition(";")
        with _as_data_error(choice):
            made = faiss.index_factory(index.record["dim"], factory, faiss.METRIC_INNER_PRODUCT)
            step = -(-len(index) // _TRAINED_ON)
            if not made.is_trained:
                made.train(np.concatenate([tile[::step] for tile in index.tiles()]))
            for tile in index.tiles():
                made.add(tile)
                progress(made.ntotal, len(index))
            if parameters:
                faiss.ParameterSpace().set_index_parameters(made, parameters)
            made.search(index.vectors_of(np.array([0])), 1)  # faiss checks parameters here
        self._found = made

    def top(
        self, query: NDArray[np.floating[Any]], top_k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """As `Index.top`, of the rows that faiss finds; row -1, score -inf: it finds fewer."""
        with _as_data_error(self._choice):
            _, rows = self._found.search(query.astype(np.float32), min(top_k, len(self._index)))
        scores = np.full(rows.shape, -np.inf, np.float32)
        for number, row in enumerate(rows):
            vectors = self._index.vectors_of(row[row >= 0]).astype(np.float64)
            scores[number, row >= 0] = np.einsum("d,kd->k", query[number], vectors)
        order = np.lexsort((rows, -scores))
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def recall(self, query: NDArray[np.floating[Any]], top_k: int) -> float:
        """The share of the exact `top_k` rows that `top` finds."""
        exact, found = self._index.top(query, top_k)[1], self.top(query, top_k)[1]
        both = sum(len(np.intersect1d(*rows)) for rows in zip(exact, found, strict=True))
        return both / exact.size


@contextmanager
def _as_data_error(choice: str) -> Iterator[None]:
    """Inside, an error of faiss, a bare RuntimeError with a place in its code, is a `DataError`."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).rsplit(": ", 1)[-1][:200]
        raise DataError(f"--faiss {choice}: refused by faiss ({reason})") from error
