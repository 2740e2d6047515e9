"""Exact search: the texts nearest to a query.

Every vector is compared. An index on disk is read in tiles, so memory does not grow with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_recompute._files import read_json, write_json, write_text, writing, written_whole
from paddle_recompute.app.retrieval.encoding import beside, one_line
from paddle_recompute.app.retrieval.trained import (
    Side,
    TrainedEncoder,
    check_count,
    check_encoder,
    check_texts,
    encode_texts,
    load_encoder,
)
from paddle_recompute.errors import DataError

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
    """Integers of 32 bits in the order of the numbers; applied twice, the numbers' bits again."""
    bits = numbers.view(np.int32)
    return np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)


_TILE = 8192


@dataclass(frozen=True)
class Hit:
    """A text that `Index.search` found.

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
    """Vectors with their texts, in memory or on disk, and exact search among them.

    Every query is compared with every vector.

    Args:
        vectors: ``[texts, dim]``, floating point; for example from `encode_texts`.
        texts: One for each vector. A line break in a text becomes a space.
        encoder: What made the vectors; `search` encodes queries with it.

    Attributes:
        record: What `save` writes beside the vectors.
        model: The folder of the checkpoint that made the vectors; None: not known.
        fingerprint: The fingerprint of that model; empty: not known.

    Raises:
        DataError: The number of texts is another than that of the vectors, a vector is not finite,
            or an argument has another type.

    Examples:
        >>> from paddle_recompute import Index, encode_texts, load_encoder
        >>> encoder = load_encoder("outputs/run")
        >>> texts = ["big cat", "small dog", "stone house"]
        >>> index = Index(encode_texts(encoder, texts), texts, encoder=encoder)
        >>> [hit.text for hit in index.search(["small dog"], top_k=1)[0]]
        ['small dog']
        >>> index.save("pool.npy")
        >>> scores, rows = Index.load("pool.npy").top(encode_texts(encoder, ["big cat"]), 2)
        >>> int(rows[0, 0])
        0
    """

    def __init__(
        self,
        vectors: NDArray[np.floating[Any]],
        texts: Sequence[str],
        *,
        encoder: TrainedEncoder | None = None,
    ) -> None:
        check_texts(texts)
        if encoder is not None:
            check_encoder(encoder)
        _check_array("vectors", vectors)
        if vectors.ndim != 2 or not vectors.size or len(vectors) != len(texts):
            raise DataError(
                f"received vectors of shape {vectors.shape} and {len(texts)} texts; allowed are "
                "[n, dim] and n texts, n and dim of at least 1"
            )
        self.file: Path | None = None
        with np.errstate(over="ignore"):  # beyond float32 is not finite
            self._vectors = np.ascontiguousarray(vectors, "<f4")
        if not np.isfinite(self._vectors).all():
            raise DataError("received vectors that are not finite in float32")
        self._shape: tuple[int, int] = len(texts), vectors.shape[1]
        self._texts = [one_line(text) for text in texts]
        self._is_finite = self._has_its_texts = True
        digest = hashlib.sha256("".join(f"{text}\n" for text in self._texts).encode())
        self._encoder = encoder
        self.model = encoder.folder if encoder is not None else None
        self.fingerprint = encoder.fingerprint if encoder is not None else ""
        self.record: dict[str, Any] = {
            "texts": len(texts),
            "texts_sha256": digest.hexdigest(),
            "fingerprint": self.fingerprint,
            "dim": self._shape[1],
            "done": len(texts),
            "model": str(self.model.resolve()) if self.model is not None else "",
            "step": encoder.step if encoder is not None else 0,
        }

    @classmethod
    def load(cls, path: str | Path) -> Index:
        """The index in a file; its vectors and texts stay on disk.

        Args:
            path: The ``.npy`` file that `save` or `encode_file` wrote, or a folder with one such
                file.

        Raises:
            DataError: There is no such file, or more than one; or it is incomplete or damaged.
        """
        index = cls.__new__(cls)
        index.file, index._encoder = _find(Path(path)), None
        index._is_finite = index._has_its_texts = False  # not known yet
        described = beside(index.file, ".json")
        try:
            index.record = read_json(described)
            index._shape = int(index.record["texts"]), int(index.record["dim"])
            done = int(index.record["done"])
            index.model = Path(index.record["model"]) if index.record["model"] else None
            index.fingerprint = str(index.record["fingerprint"])
            index.record["texts_sha256"] = str(index.record["texts_sha256"])
        except OSError as error:
            raise DataError(
                f"{described}: cannot be read ({error.strerror}); `paddle-recompute encode` writes "
                f"it beside {index.file.name}, and it names the model; encode the texts again"
            ) from error
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise DataError(f"{described}: is damaged ({error!r})") from error
        if done < index._shape[0]:
            raise DataError(
                f"{index.file}: holds {done} of {index._shape[0]} texts; run the same "
                "`paddle-recompute encode` again, which continues"
            )
        return index

    def save(self, path: str | Path) -> None:
        """Write what ``encode`` writes: ``pool.npy``, ``pool.npy.txt`` and ``pool.npy.json``.

        Raises:
            DataError: `path` does not end in ``.npy``, or this index is on disk already.
            OutputError: `path` cannot be written.
        """
        path = Path(path)
        if path.suffix != ".npy" or self.file is not None:
            raise DataError(
                f"{path}: allowed is a name that ends in .npy"
                if self.file is None
                else f"{self.file}: is saved already; copy it and the two files beside it"
            )
        with writing(path, "name another file"):
            beside(path, ".json").unlink(missing_ok=True)  # that of another index
            with written_whole(path) as unfinished:
                np.save(unfinished, self._vectors)
            write_text(beside(path, ".txt"), "".join(f"{text}\n" for text in self._texts))
            write_json(beside(path, ".json"), self.record)

    @property
    def truncate_dim(self) -> int | None:
        """The `truncate_dim` of the encoder that made the vectors."""
        return self._shape[1] if "-" in self.fingerprint else None

    def __len__(self) -> int:
        """Its number of texts."""
        return self._shape[0]

    def _tiles(self) -> Iterator[NDArray[np.float32]]:
        """The vectors, in blocks ``[rows, dim]``."""
        for first in range(0, len(self), _TILE):
            vectors = self._vectors_from(first)
            if not self._is_finite and not np.isfinite(vectors).all():
                last = first + len(vectors) - 1
                raise DataError(
                    f"{self.file}: rows {first} to {last} hold vectors that are not finite; encode "
                    "the texts again"
                )
            yield vectors
        self._is_finite = True

    def _vectors_from(self, first: int) -> NDArray[np.float32]:
        """The tile that begins with this row."""
        if self.file is None:
            return self._vectors[first : first + _TILE]
        # Mapped anew each time: pages that stay mapped count as memory of the process.
        return np.array(_mapped(self.file, self._shape)[first : first + _TILE])

    def every_text(self) -> Iterator[str]:
        """All texts, in the order of the rows.

        Raises:
            DataError: The file cannot be read, or holds, at its end, other texts than were encoded.
        """
        if self.file is None:
            yield from self._texts
            return
        file = beside(self.file, ".txt")
        rows, digest = 0, hashlib.sha256()
        try:
            with file.open("rb") as lines:
                for rows, line in enumerate(lines, start=1):  # noqa: B007
                    if not self._has_its_texts:
                        digest.update(line)
                    yield line.decode().rstrip("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: cannot be read ({error})") from error
        if rows != self._shape[0]:
            raise DataError(f"{file}: has {rows} texts; expected {self._shape[0]}")
        if not self._has_its_texts and digest.hexdigest() != self.record["texts_sha256"]:
            raise DataError(f"{file}: has other texts than were encoded; encode the texts again")
        self._has_its_texts = True

    def texts(self, rows: Iterable[int]) -> dict[int, str]:
        """The texts of these rows."""
        wanted = set(rows)
        if self.file is None:
            return {row: self._texts[row] for row in wanted}
        return {row: text for row, text in enumerate(self.every_text()) if row in wanted}

    def check_model(self, encoder: TrainedEncoder) -> None:
        """Check that `encoder` made these vectors.

        Raises:
            DataError: It did not.
        """
        if encoder.fingerprint != self.fingerprint:
            raise DataError(
                f"{self.file or 'the index'}: was encoded by another model than that in "
                f"{encoder.folder}; their vectors cannot be compared. Encode the texts again, or "
                "name the other model's folder"
            )

    def top(
        self, query: NDArray[np.floating[Any]], top_k: int = 10
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The largest inner products of each query vector, and their rows.

        Args:
            query: ``[n, dim]``, floating point, finite.
            top_k: Rows per query; fewer if the index has fewer.

        Returns:
            Scores, float32, and rows, int64: ``[n, top_k]``, the largest first; of equal scores the
            smaller row first.

        Raises:
            DataError: The type or shape of `query` does not fit, it or a score is not finite, or
                `top_k` is no number of at least 1.
        """
        _check_array("queries", query)
        check_count("top_k", top_k)
        if query.ndim != 2 or query.shape[1] != self._shape[1]:
            raise DataError(
                f"received queries of shape {query.shape}; allowed is [n, {self._shape[1]}]"
            )
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(query.astype(np.float32)).all()
        if not is_finite:
            raise DataError("received queries that are not finite in float32")
        scores, rows = top_of_tiles(query, self._tiles(), top_k)
        if rows.shape[1] < min(top_k, len(self)) or not np.isfinite(scores).all():
            raise DataError("the inner products of these queries are not finite in float32")
        return scores, rows

    def search(
        self,
        queries: Sequence[str],
        *,
        top_k: int = 10,
        side: Side = "query",
        encoder: TrainedEncoder | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> list[list[Hit]]:
        """The nearest texts for each query.

        Args:
            queries: At least one; none is blank.
            top_k: Texts per query; fewer if the index has fewer.
            side: ``document``: the queries have prompt and limit of documents.
            encoder: What made the vectors; None: the model that the index names, loaded once.
            tell: Called with a sentence for every query that is cut or has unknown words.

        Returns:
            For each query the hits, nearest first; of equal scores the smaller row comes first.

        Raises:
            DataError: There is no query, a query is blank, another model made the vectors, or an
                argument has another type.
            CheckpointError: The model that the index names does not exist any more.
        """
        check_texts(queries)
        check_count("top_k", top_k)
        if encoder is not None:
            check_encoder(encoder)
        if not queries or not all(query.strip() for query in queries):
            blank = "none" if not queries else "a blank query"
            raise DataError(f"received {blank}; give one or more queries, each with some text")
        encoder = encoder or self._own_encoder()
        self.check_model(encoder)
        queries = [query.strip() for query in queries]
        if tell is not None:
            _tell_of_losses(encoder, queries, side, tell)
        scores, rows = self.top(encode_texts(encoder, queries, side=side), top_k)
        texts = self.texts(rows.ravel().tolist())
        return [
            [
                Hit(rank, score, row, texts[row])
                for rank, (score, row) in enumerate(zip(*found, strict=True), start=1)
            ]
            for found in zip(scores.tolist(), rows.tolist(), strict=True)
        ]

    def _own_encoder(self) -> TrainedEncoder:
        if self._encoder is None:
            if self.model is None:
                raise DataError("the index names no model; give the encoder that made its vectors")
            folder = self.model if self.model.is_dir() else self.model.parent
            self._encoder = load_encoder(folder, truncate_dim=self.truncate_dim)
        return self._encoder


def _tell_of_losses(
    encoder: TrainedEncoder, queries: Sequence[str], side: Side, tell: Callable[[str], object]
) -> None:
    longest, kind = encoder.longest(side), "queries" if side == "query" else "positives"
    for query in queries:
        tokens = encoder.tokenizer.tokenize([encoder.prompts[side] + query], longest)
        if tokens.num_cut:
            tell(f"{query!r} is cut after {longest} tokens, the limit for {kind} in training")
        if tokens.num_unknown:
            tell(f"{query!r} has words outside the vocabulary; each of them is read as [UNK]")


def _check_array(name: str, array: object) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise DataError(f"received {name} of {kind}; allowed is a numpy array of floating point")


def _mapped(file: Path, shape: tuple[int, int]) -> NDArray[np.float32]:
    """The vectors in a file, not read yet."""
    try:
        vectors: NDArray[np.float32] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{file}: cannot be read as vectors ({error})") from error
    if vectors.shape != shape or vectors.dtype != np.dtype("<f4"):
        raise DataError(
            f"{file}: has the shape {vectors.shape}, {vectors.dtype}; expected {shape}, float32"
        )
    return vectors


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
        names = ", ".join(file.name for file in found) or "no .npy file"
        raise DataError(f"{path}: holds {names} that `encode` wrote; name one, or encode texts")
    return found[0]
