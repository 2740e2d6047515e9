"""Mine hard negatives: texts of a pool that a trained encoder takes for answers.

The search is exact: each query is compared with every text. Queries are read in blocks and the pool
in tiles, so memory grows with the pool by 16 bytes per text only. An interrupted run continues
where it stopped and writes the same bytes. The output is:

- ``mined.jsonl``: the pairs, each with its ``negatives``, nearest first, for `read_pairs`;
- ``mined.jsonl.json``: the record, with counts and histograms;
- ``mined.jsonl.pool.npy`` and its companions: the encoded pool, unless an encoded one is given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_recompute._files import write_json, writing
from paddle_recompute.app.data import Pair, normal_form, read_pairs
from paddle_recompute.app.retrieval.encoding import (
    begun,
    beside,
    encode_file,
    locked,
    write_at,
)
from paddle_recompute.app.retrieval.index import Index
from paddle_recompute.app.retrieval.trained import TrainedEncoder, encode_texts
from paddle_recompute.errors import DataError

_BLOCK = 256
"""Pairs that are searched for and written at once."""
_BINS = np.linspace(-1, 1, 21)


@dataclass(frozen=True)
class MiningOptions:
    """Which texts become negatives.

    Attributes:
        num_negatives: The most for a pair; the nearest are taken.
        first_rank: The nearest text that may be one, 1 or more. Texts that are no candidates are
            not counted.
        last_rank: The farthest.
        margin: A negative's score is at most the positive's minus this; None: any score.
        relative_margin: A negative's score is at most the positive's minus this share of its
            magnitude; None: any score.

    Raises:
        DataError: `first_rank` and `last_rank` are no range of ranks.
    """

    num_negatives: int = 5
    first_rank: int = 1
    last_rank: int = 100
    margin: float | None = None
    relative_margin: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.first_rank <= self.last_rank:
            raise DataError(
                f"received ranks {self.first_rank} to {self.last_rank}; the first is at least 1, "
                "and at most the last"
            )

    def highest_score(self, positive: NDArray[np.float32]) -> NDArray[np.float64]:
        """The highest score of a negative, from that of the positive."""
        score = positive.astype(np.float64)
        absolute = score - self.margin if self.margin is not None else np.inf
        share = self.relative_margin
        relative = score - share * np.abs(score) if share is not None else np.inf
        highest: NDArray[np.float64] = np.minimum(np.broadcast_to(absolute, score.shape), relative)
        return highest


def mine(
    encoder: TrainedEncoder,
    pairs_file: str | Path,
    pool: str | Path,
    output: str | Path,
    options: MiningOptions | None = None,
    *,
    batch_size: int = 256,
    progress: Callable[[str, int, int], object] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Write the pairs of a file with mined negatives; continue an interrupted call.

    No candidate is a text that equals, in `normal_form`, the query or a positive of a pair whose
    query equals it. Of equal texts one is taken. A pair gets fewer negatives, or none, where too
    few texts are in the ranks and margins. Negatives that a pair had are replaced.

    Args:
        encoder: From `load_encoder`.
        pairs_file: A ``.tsv`` or ``.jsonl`` file of pairs.
        pool: A text file, one text per line; or the ``.npy`` file into which `encode_file` has
            encoded one with the same encoder.
        output: Ends in ``.jsonl``.
        options: Which texts become negatives.
        batch_size: Texts encoded at once.
        progress: Called with what is done (``encode``, ``mine``), how much of it, and of how much.

    Returns:
        The record: ``pairs``, ``done`` (the same), ``lines_with`` (the number of pairs with 0, 1,
        ... negatives), ``replaced`` (negatives that pairs had), ``scores_of_negatives`` and
        ``scores_of_positives`` (counts of 20 equal parts of [-1, 1]), and what it was made from.

    Raises:
        DataError: A file cannot be read, is damaged, or was made with other inputs.
        OutputError: `output` cannot be written.
    """
    options, output = options or MiningOptions(), Path(output)
    if output.suffix != ".jsonl":
        raise DataError(f"{output}: received the suffix {output.suffix!r}; allowed is .jsonl")
    found = read_pairs(pairs_file)
    index = _index(encoder, Path(pool), output, batch_size, partial(progress, "encode"))
    inputs = {
        "pairs": len(found.pairs),
        "pairs_sha256": found.sha256,
        "pool_sha256": index.record["texts_sha256"],
        "fingerprint": encoder.fingerprint,
        "options": asdict(options),
        "batch_size": batch_size,
    }
    fresh: dict[str, Any] = {
        **dict.fromkeys(("done", "bytes", "replaced"), 0),
        "lines_with": [0] * (options.num_negatives + 1),
        "scores_of_negatives": [0] * (len(_BINS) - 1),
        "scores_of_positives": [0] * (len(_BINS) - 1),
    }
    described = beside(output, ".json")
    output.parent.mkdir(parents=True, exist_ok=True)
    with writing(output, "name another file"), locked(output) as file:
        record = begun(file, output, inputs, fresh, lambda one: int(one["bytes"]))
        miner = _Miner(encoder, index, found.pairs, options, batch_size)
        if not record["done"]:
            write_json(described, record)  # before there is a byte in the file
        progress("mine", record["done"], len(found.pairs))
        while block := found.pairs[record["done"] : record["done"] + _BLOCK]:
            lines = []
            for pair, negatives, scores, positive in miner.mined(block):
                tree = {"query": pair.query, "positive": pair.positive, "negatives": negatives}
                lines.append(json.dumps(tree, ensure_ascii=False) + "\n")
                record["lines_with"][len(negatives)] += 1
                for name, some_scores in (("negatives", scores), ("positives", [positive])):
                    name = f"scores_of_{name}"
                    record[name] = (record[name] + _histogram(some_scores)).tolist()
            content = "".join(lines).encode()
            write_at(file, record["bytes"], content)
            record["done"] += len(block)
            record["replaced"] += sum(len(pair.negatives) for pair in block)
            record["bytes"] += len(content)
            write_json(described, record)
            progress("mine", record["done"], len(found.pairs))
    return record


class _Miner:
    """Finds the negatives of some pairs."""

    def __init__(
        self,
        encoder: TrainedEncoder,
        index: Index,
        pairs: Sequence[Pair],
        options: MiningOptions,
        batch_size: int,
    ) -> None:
        self._encoder, self._index, self._options = encoder, index, options
        self._batch_size = batch_size
        self._positives: dict[str, set[str]] = {}
        for pair in pairs:
            self._positives.setdefault(normal_form(pair.query), set()).add(pair.positive)
        forms = np.fromiter(map(_form, index.every_text()), np.uint64, int(index.record["texts"]))
        self._order = np.argsort(forms, kind="stable")
        self._forms = forms[self._order]

    def mined(self, block: Sequence[Pair]) -> Iterator[tuple[Pair, list[str], list[float], float]]:
        """Each pair, its negatives, their scores, and the score of its positive."""
        encoder, options = self._encoder, self._options
        size = self._batch_size
        queries, positives = [pair.query for pair in block], [pair.positive for pair in block]
        query = encode_texts(encoder, queries, side="query", batch_size=size)
        positive = encode_texts(encoder, positives, batch_size=size)
        of_positive = np.einsum("nd,nd->n", query, positive, dtype=np.float64).astype(np.float32)
        highest = options.highest_score(of_positive)
        excluded = [self._excluded(pair) for pair in block]
        most = max(map(len, excluded))
        scores, rows = self._index.top(query, options.last_rank + most)
        texts = self._index.texts(rows.ravel().tolist())
        for place, pair in enumerate(block):
            rank, negatives = 0, dict[str, float]()
            for score, row in zip(scores[place].tolist(), rows[place].tolist(), strict=True):
                if row in excluded[place] or not texts[row].strip():
                    continue
                rank += 1
                if rank > options.last_rank or len(negatives) == options.num_negatives:
                    break
                if rank >= options.first_rank and score <= highest[place]:
                    negatives.setdefault(texts[row], score)
            yield pair, [*negatives], [*negatives.values()], float(of_positive[place])

    def _excluded(self, pair: Pair) -> set[int]:
        """The rows of the pool that are no candidates for this pair."""
        rows: set[int] = set()
        for text in (pair.query, *self._positives[normal_form(pair.query)]):
            form = np.uint64(_form(text))
            first, last = (np.searchsorted(self._forms, form, side) for side in ("left", "right"))
            rows.update(self._order[first:last].tolist())
        return rows


def _index(
    encoder: TrainedEncoder,
    pool: Path,
    output: Path,
    batch_size: int,
    progress: Callable[[int, int], object],
) -> Index:
    if pool.suffix != ".npy":
        encoded = beside(output, ".pool.npy")
        encode_file(encoder, pool, encoded, batch_size=batch_size, progress=progress)
        pool = encoded
    index = Index.load(pool)
    index.check_model(encoder)
    return index


def _form(text: str) -> int:
    """64 bits of the normal form of a text."""
    digest = hashlib.blake2b(normal_form(text).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _histogram(scores: Sequence[float]) -> NDArray[np.int64]:
    # Rounding may leave a cosine just outside of [-1, 1].
    return np.histogram(np.clip(scores, -1, 1), _BINS)[0].astype(np.int64)
