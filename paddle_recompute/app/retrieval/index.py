"""Exact search in an encoded pool: the texts nearest to a query.

The pool is a file that `encode_file` wrote. It is read in tiles and every vector is compared, so
memory does not grow with the pool; a million vectors of 128 numbers take about a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_recompute._files import read_json
from paddle_recompute.app.retrieval.evaluation import encode_texts
from paddle_recompute.app.retrieval.trained import TrainedEncoder, load_encoder
from paddle_recompute.errors import DataError

_TILE = 8192


@dataclass(frozen=True)
class Hit:
    """A text that `search` found.

    Attributes:
        rank: 1 is nearest.
        score: The cosine of the query's vector and the text's.
        row: Its row in the pool, from 0.
        text: The text.
    """

    rank: int
    score: float
    row: int
    text: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Index:
    """An encoded pool on disk.

    Args:
        path: The ``.npy`` file that `encode_file` wrote, or a folder with one such file.

    Attributes:
        file: The file.
        about: The content of its ``.json`` file.
        model: The folder of the checkpoint that encoded it.
        fingerprint: The fingerprint of that model.

    Raises:
        DataError: There is no such file, or more than one; or it is incomplete or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.file = _find(Path(path))
        described = self.file.with_name(f"{self.file.name}.json")
        try:
            self.about: dict[str, Any] = read_json(described)
            self._shape = int(self.about["texts"]), int(self.about["dim"])
            done = int(self.about["done"])
            self.model = Path(self.about["model"])
            self.fingerprint = str(self.about["fingerprint"])
        except OSError as error:
            raise DataError(
                f"{described}: cannot be read ({error.strerror}); `paddle-recompute encode` writes "
                f"it beside {self.file.name}, and it names the model; encode the texts again"
            ) from error
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DataError(f"{described}: is damaged ({error!r})") from error
        if done < self._shape[0]:
            raise DataError(
                f"{self.file}: holds {done} of {self._shape[0]} texts; run the same "
                "`paddle-recompute encode` again, which continues"
            )

    def tiles(self) -> Iterator[NDArray[np.float32]]:
        """The vectors, in blocks ``[rows, dim]``."""
        try:
            vectors = np.load(self.file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.file}: cannot be read as vectors ({error})") from error
        if vectors.shape != self._shape:
            raise DataError(f"{self.file}: has the shape {vectors.shape}; expected {self._shape}")
        for first in range(0, len(vectors), _TILE):
            yield np.asarray(vectors[first : first + _TILE])

    def texts(self, rows: Iterable[int]) -> dict[int, str]:
        """The texts of these rows."""
        wanted = set(rows)
        file = self.file.with_name(f"{self.file.name}.txt")
        try:
            with file.open(encoding="utf-8", newline="\n") as lines:
                found = {row: line.rstrip("\n") for row, line in enumerate(lines) if row in wanted}
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: cannot be read ({error})") from error
        if missing := wanted.difference(found):
            raise DataError(f"{file}: has no text number {min(missing) + 1}; the file is truncated")
        return found


def search(
    index: Index,
    queries: Sequence[str],
    *,
    top_k: int = 10,
    encoder: TrainedEncoder | None = None,
    tell: Callable[[str], object] | None = None,
) -> list[list[Hit]]:
    """The nearest texts of the pool for each query.

    Args:
        index: The pool.
        queries: At least one; none is blank.
        top_k: Texts per query; fewer if the pool has fewer.
        encoder: The model that encoded the pool; None: the model that `index` names.
        tell: Called with a sentence for every query that is cut or has unknown words.

    Returns:
        For each query the hits, nearest first; of equal scores the smaller row comes first.

    Raises:
        DataError: There is no query, a query is blank, or another model encoded the pool.
        CheckpointError: The model that `index` names does not exist any more.
    """
    if not queries or not all(query.strip() for query in queries) or top_k < 1:
        raise DataError(
            f"received {len(queries)} queries and top_k={top_k}; allowed are one query or more, "
            "none of them blank, and top_k of at least 1"
        )
    if encoder is None:
        encoder = load_encoder(index.model.parent)
    if encoder.fingerprint != index.fingerprint:
        raise DataError(
            f"{index.file}: was encoded by another model than that in {encoder.folder}; their "
            "vectors cannot be compared. Encode the texts again, or name the other model's folder"
        )
    queries = [query.strip() for query in queries]
    longest = min(encoder.max_query_tokens, encoder.reads_at_most)
    if tell is not None:
        for query in queries:
            tokens = encoder.tokenizer.tokenize([query], longest)
            if tokens.num_cut:
                tell(f"{query!r} is cut after {longest} tokens, the limit for queries in training")
            if tokens.num_unknown:
                tell(f"{query!r} has words outside the vocabulary; each of them is read as [UNK]")
    vectors = encode_texts(
        encoder.model, encoder.tokenizer, queries, max_tokens=longest, batch_size=256
    )
    scores, rows = top_of_tiles(vectors, index.tiles(), top_k)
    texts = index.texts(rows.ravel().tolist())
    return [
        [
            Hit(rank, score, row, texts[row])
            for rank, (score, row) in enumerate(zip(*found, strict=True), start=1)
        ]
        for found in zip(scores.tolist(), rows.tolist(), strict=True)
    ]


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
    scores = np.empty((len(query), 0), np.float32)
    rows = np.empty((len(query), 0), np.int64)
    first = 0
    for tile in tiles:
        # Summed in float64 and rounded: equal rows have equal scores in every tile.
        found = (query @ tile.astype(np.float64).T).astype(np.float32)
        places = np.broadcast_to(np.arange(first, first + len(tile)), found.shape)
        first += len(tile)
        scores = np.concatenate([scores, found], axis=1)
        rows = np.concatenate([rows, places], axis=1)
        # Stable sort over ascending rows: of equal scores the smaller row stays first.
        best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        scores, rows = np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)
    return scores, rows


def _find(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"{path}: there is no such file; `paddle-recompute encode` makes one")
        if path.suffix != ".npy":
            raise DataError(f"{path}: is no .npy file; encode the texts into one")
        return path
    described = [file.with_suffix("") for file in path.glob("*.npy.json")]
    found = sorted(file for file in described if file.exists())
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise DataError(f"{path}: holds {names} of encoded texts; name one file")
    return found[0]
