"""Approximate search: an index of faiss proposes the nearest texts, and their scores are exact.

The index of faiss is in memory, and in a file, so that a later call finds the same texts. A file
``.json`` beside it says what it was made from; another one is never read.
"""

from __future__ import annotations

import hashlib
import logging
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_recompute._files import read_json, written_whole
from paddle_recompute.app.retrieval.encoding import as_data_error, beside, write_json
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
        file: Where the index of faiss is, or is written.
        progress: Called with (texts added, texts in all).

    Attributes:
        sha256: Of its file.

    Raises:
        DataError: faiss does not know `choice`, or refuses these vectors; or the file cannot be
            written, or was there and is of something else.
        DependencyError: The package `faiss` is not installed.
    """

    def __init__(
        self, index: Index, choice: str, file: Path, progress: Callable[[int, int], object]
    ) -> None:
        faiss, self._index = require_faiss(), index
        factory, _, parameters = choice.partition(";")
        inputs = {
            "faiss": factory,
            "version": faiss.__version__,
            "texts_sha256": index.record["texts_sha256"],
            "fingerprint": index.fingerprint,
        }
        self._choice = choice
        with _in_words(choice):
            self.sha256 = _made_from(file, inputs)
            if self.sha256:
                self._found = self._ready(faiss.read_index(str(file)), parameters)
            else:
                made = faiss.index_factory(index.record["dim"], factory, faiss.METRIC_INNER_PRODUCT)
                step = -(-len(index) // _TRAINED_ON)
                if not made.is_trained:
                    made.train(np.concatenate([tile[::step] for tile in index.tiles()]))
                for tile in index.tiles():
                    made.add(tile)
                    progress(made.ntotal, len(index))
                with as_data_error(file), written_whole(file) as unfinished:
                    faiss.write_index(made, str(unfinished))
                    del made
                    self._found = self._ready(faiss.read_index(str(unfinished)), parameters)
                    self.sha256 = _sha256(unfinished)
                    write_json(beside(file, ".json"), inputs | {"sha256": self.sha256})

    def _ready(self, found: Any, parameters: str) -> Any:
        """The index of faiss `found` with its parameters; faiss checks them when it searches."""
        if parameters:
            require_faiss().ParameterSpace().set_index_parameters(found, parameters)
        found.search(self._index.vectors_of(np.array([0])), 1)
        return found

    def top(
        self, query: NDArray[np.floating[Any]], top_k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """As `Index.top`, of the rows that faiss finds; row -1, score -inf: it finds fewer."""
        with _in_words(self._choice):
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


def _made_from(file: Path, inputs: dict[str, Any]) -> str:
    """The digest of a file that was made from `inputs`; empty if there is none, or another."""
    described = beside(file, ".json")
    if not file.exists():
        return ""
    if not described.exists():
        raise DataError(f"{file}: exists, and this command did not write it; name another output")
    digest = _sha256(file)
    try:
        return digest if read_json(described) == inputs | {"sha256": digest} else ""
    except ValueError:
        return ""


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while some := content.read(1 << 20):
            digest.update(some)
    return digest.hexdigest()


@contextmanager
def _in_words(choice: str) -> Iterator[None]:
    """Inside, an error of faiss, a bare RuntimeError with a place in its code, is a `DataError`."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).rsplit(": ", 1)[-1][:200]
        raise DataError(f"--faiss {choice}: refused by faiss ({reason})") from error
