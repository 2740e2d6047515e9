r"""Retrieval quality: encode texts, rank a pool for each query, and measure the ranks.

On several ranks, each rank encodes a share of the batches of one process. No batch is split, so the
operands are the same and the vectors equal those of one process bit by bit.

Each metric is the mean over the queries. Of a query with the answers :math:`a` at the ranks
:math:`r_a`, of the grades :math:`g_a`:

- ``recall@k``: the share of its answers with :math:`r_a \le k`;
- ``precision@k``: their number, divided by k;
- ``ndcg@k``: the sum of :math:`g_a / \log_2(r_a + 1)` over them, divided by the largest possible;
- ``map``: the mean of (answers at rank :math:`r_a` or before) / :math:`r_a`, over all answers;
- ``mrr``: 1 / the least :math:`r_a`.

These are the definitions of trec_eval (Jarvelin and Kekalainen, "Cumulated Gain-Based Evaluation
of IR Techniques", TOIS 20(4), 2002, for nDCG), on the ranking of all candidates.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray

from paddle_recompute.contrastive import agree_on_rows, gather_rows
from paddle_recompute.distributed import barrier, is_distributed, values_of_ranks
from paddle_recompute.errors import DataError, SyncError

Ints = NDArray[np.int64]
NDCG_AT = 10
_NEVER = np.int64(1 << 62)
"""The rank of an answer that is not in the pool."""


@dataclass(frozen=True)
class Judgements:
    """The answers of the queries. One row is one answer of one query; a query has at least one.

    Attributes:
        query: ``[answers]``, int64, ascending: the number of the query.
        candidate: ``[answers]``, int64: the answer's row in the pool; below -1: it is not there.
        grade: ``[answers]``, int64, at least 1; higher is better.
    """

    query: Ints
    candidate: Ints
    grade: Ints

    @classmethod
    def of(cls, answers: Sequence[Mapping[int, int]]) -> Judgements:
        """From the grade of each answer, by its row in the pool, for each query."""
        rows = [(query, *item) for query, some in enumerate(answers) for item in some.items()]
        columns = np.array(rows, np.int64).reshape(-1, 3).T
        return cls(*columns)

    @classmethod
    def single(cls, target: NDArray[np.integer[Any]]) -> Judgements:
        """One answer for each query, `target` ``[queries]``, of grade 1."""
        count = len(target)
        return cls(np.arange(count), target.astype(np.int64), np.ones(count, np.int64))

    def of_queries(self, first: int, last: int) -> slice:
        """The rows of the queries `first` to before `last`."""
        start, stop = np.searchsorted(self.query, [first, last])
        return slice(int(start), int(stop))


def metrics_of_ranks(ranks: Ints, judged: Judgements, ks: Sequence[int]) -> dict[str, float]:
    """The metrics of the module, and ``queries``, their number.

    Args:
        ranks: ``[answers]``: the number of candidates that score at least as much as the answer,
            itself included. Answers of the same query may be among them: of equal ones, that with
            the highest grade is ranked last, as a tie counts against the model.
        judged: The answers.
        ks: The k of each recall@k and precision@k.
    """
    names = [f"{name}@{k}" for name in ("recall", "precision") for k in ks]
    names += [f"ndcg@{NDCG_AT}", "map", "mrr"]
    bounds = [*np.flatnonzero(np.diff(judged.query, prepend=-1)).tolist(), len(ranks)]
    table = np.empty((len(names), len(bounds) - 1))
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        table[:, number] = _of_query(ranks[first:last], judged.grade[first:last], ks)
    means = {name: float(np.mean(row)) for name, row in zip(names, table, strict=True)}
    return {**means, "queries": table.shape[1]}


def _of_query(ranks: Ints, grades: Ints, ks: Sequence[int]) -> list[float]:
    order = np.lexsort((grades, ranks))
    ranks, grades, place = ranks[order], grades[order], np.arange(len(ranks))
    # No two answers have one rank: each is at least one before the next.
    ranks = place + np.minimum.accumulate((ranks - place)[::-1])[::-1]
    gains = np.where(ranks <= NDCG_AT, grades / np.log2(ranks + 1.0), 0.0)
    best = (np.sort(grades)[::-1] / np.log2(place + 2.0))[:NDCG_AT]
    found = [int(np.count_nonzero(ranks <= k)) for k in ks]
    return [
        *(count / len(ranks) for count in found),
        *(count / k for count, k in zip(found, ks, strict=True)),
        float(gains.sum() / best.sum()),
        float(np.mean((place + 1) / ranks)),
        1.0 / int(ranks[0]),
    ]


Vectors = NDArray[np.floating[Any]]


class Tokenizer(Protocol):
    """What `encode_batches` calls on a tokenizer."""

    def encode(self, texts: list[str], max_tokens: int, /) -> NDArray[np.int64]:
        """Ids ``[len(texts), length]``, padded to the longest of these texts."""
        ...


def encode_batches(
    model: paddle.nn.Layer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    max_tokens: int,
    batch_size: int,
    prompt: str = "",
    truncate_dim: int | None = None,
    progress: Callable[[int], object] | None = None,
    over_ranks: bool = False,
) -> NDArray[np.float32]:
    """The normalised vectors of `texts`, computed in evaluation mode and without gradients.

    Texts are sorted by their number of characters, longest first: a batch has little padding, and a
    batch that is too large for the memory fails at once. No random number is drawn. Every sublayer
    gets back the mode (training or evaluation) that it had.

    Args:
        model: Maps ids ``[batch, length]``, int64, to vectors ``[batch, dim]``.
        tokenizer: Makes the ids; `PairTokenizer` is one.
        texts: At least one.
        max_tokens: Longer texts are cut.
        batch_size: Texts per batch.
        prompt: Put before each text.
        truncate_dim: Numbers of a vector that are kept, the first ones; None: all.
        progress: Called after every batch with its number of texts, as ``tqdm.update``.
        over_ranks: Every rank calls this with the same texts and encodes a share of the batches;
            every rank gets all vectors.

    Returns:
        ``[len(texts), dim]``, float32, row i of text i, each of length 1 (a zero vector stays
        zero).

    Raises:
        DataError: There are no texts, or `batch_size` is less than 1.
        SyncError: The ranks' texts differ.
    """
    if not texts or batch_size < 1:
        raise DataError(
            f"received {len(texts)} texts and batch_size={batch_size}; both must be at least 1"
        )
    rank, num_ranks = place_of(over_ranks)
    if num_ranks > 1:  # joined vectors of different texts would mean nothing
        checksum = zlib.crc32("\0".join(texts).encode())
        if len(set(values_of_ranks(checksum, "the checksum of the texts"))) > 1:
            raise SyncError("the ranks' texts differ; with over_ranks=True all ranks need the same")
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    shares = [batches[first::num_ranks] for first in range(num_ranks)]
    vectors: NDArray[np.float32] | None = None
    with _evaluation_mode(model), paddle.no_grad():
        # As many on all ranks: a model may be spread over them (recompute.offload_parameters).
        for rows in [*shares[rank], batches[0]][: len(shares[0])]:
            ids = tokenizer.encode([prompt + texts[row] for row in rows], max_tokens)
            batch = model(paddle.to_tensor(ids)).astype("float32").numpy()[:, :truncate_dim]
            if vectors is None:
                vectors = np.empty((len(texts), batch.shape[1]), np.float32)
            norm = np.linalg.norm(batch, axis=1, keepdims=True)
            vectors[rows] = batch / np.maximum(norm, np.finfo(np.float32).tiny)
            if progress is not None:
                progress(len(rows))
    assert vectors is not None
    if num_ranks > 1:
        barrier()  # ranks may be minutes apart here, and gloo waits at most 30 s
        own = paddle.to_tensor(vectors[list(itertools.chain(*shares[rank]))])
        (joined,) = gather_rows([own], agree_on_rows([own], None), None)
        vectors[list(itertools.chain(*itertools.chain(*shares)))] = joined.numpy()
    return vectors


def place_of(over_ranks: bool) -> tuple[int, int]:
    """This rank and the number of ranks that share the work."""
    if over_ranks and is_distributed():
        return int(dist.get_rank()), int(dist.get_world_size())
    return 0, 1


def retrieval_metrics(
    query: Vectors,
    pool: Vectors,
    target: NDArray[np.integer[Any]] | Judgements,
    *,
    ks: Sequence[int] = (1, 10),
    tile: int = 1024,
    excluded: NDArray[np.integer[Any]] | None = None,
) -> dict[str, float]:
    """The metrics of this module when the pool is sorted by its score with the query.

    The rank of an answer is the number of candidates that score at least as much, itself included:
    1 is best. A tie counts against the model, so a model that maps all texts to one vector gets
    the worst rank. Scores are inner products in float64. Two scores are equal if they differ by at
    most the rounding error of a sum of `dim` products. Otherwise the summation order of the matrix
    product would decide between equal candidates, and the rank would depend on `tile`.

    Memory: a few float64 blocks ``[tile, tile]`` and ``[tile, dim]``, never all scores.

    Args:
        query: ``[n, dim]``, floating point, n >= 1.
        pool: ``[m, dim]``, floating point, the candidates.
        target: ``[n]``, integer: the row in `pool` of each query's right answer; or the answers of
            n queries, with their grades.
        ks: The k of each recall@k and precision@k.
        tile: Queries and candidates per block.
        excluded: ``[n]``, integer: a row of `pool` that is no candidate for this query; -1: none.

    Returns:
        ``recall@k`` and ``precision@k`` for every k, ``ndcg@10``, ``map`` and ``mrr``, all in
        [0, 1]; ``pool_size`` = m, ``queries`` = n and ``tied`` (queries with an answer whose score
        another candidate has, too), integers.

    Raises:
        DataError: An answer is excluded, or a vector is not finite.
    """
    judged = target if isinstance(target, Judgements) else Judgements.single(target)
    _check_finite(query, pool)
    without = np.full(len(query), -1) if excluded is None else excluded
    if np.any(without[judged.query] == judged.candidate):
        raise DataError("an answer is excluded from the candidates of its query; leave one out")
    ranks, tied = np.full(len(judged.query), _NEVER), set[int]()
    for part in _tiles(len(query), tile):
        every = judged.of_queries(part.start, part.stop)
        of = every.start + np.flatnonzero(judged.candidate[every] >= 0)
        ranks[of], equal = _ranks(
            query[part],
            pool,
            judged.query[of] - part.start,
            judged.candidate[of],
            without[part],
            tile,
        )
        tied.update(judged.query[of][equal > 1].tolist())
    found = metrics_of_ranks(ranks, judged, ks)
    return {**found, "pool_size": len(pool), "tied": len(tied)}


def _ranks(
    query: Vectors,
    pool: Vectors,
    of: NDArray[np.int64],
    target: NDArray[np.integer[Any]],
    without: NDArray[np.integer[Any]],
    tile: int,
) -> tuple[Ints, Ints]:
    """Of each answer `target` of the query `of`: its rank, 1 or more, and how many candidates have
    its score, itself included; `query` is one tile.
    """
    query, right = query.astype(np.float64), pool[target].astype(np.float64)
    # The rounding error of a sum of dim products is at most dim * 2**-53 * |q| * |p|.
    rounding = query.shape[1] * np.finfo(np.float64).eps / 2 * _lengths(query)
    threshold = np.einsum("nd,nd->n", query[of], right) - rounding[of] * _lengths(right)
    # What is above this is more than equal: rounding errors are in both of them.
    above = 4 * rounding[of] * _lengths(pool).max()
    ranks, equal = np.zeros((2, len(target)), np.int64)
    for rows in _tiles(len(pool), tile):
        candidates = pool[rows].astype(np.float64)
        scores = query @ candidates.T
        scores += np.outer(rounding, _lengths(candidates))
        inside = np.flatnonzero((without >= rows.start) & (without < rows.stop))
        scores[inside, without[inside] - rows.start] = -np.inf
        for some in _tiles(len(target), tile):
            theirs, least = scores[of[some]], threshold[some, None]
            ranks[some] += (better := np.count_nonzero(theirs >= least, axis=1))
            equal[some] += better - np.count_nonzero(theirs > least + above[some, None], axis=1)
    return ranks, equal


def _tiles(total: int, tile: int) -> Iterator[slice]:
    for first in range(0, total, tile):
        yield slice(first, first + tile)


def _lengths(vectors: Vectors) -> NDArray[np.float64]:
    squares: NDArray[np.float64] = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    return np.sqrt(squares)


def _check_finite(query: Vectors, pool: Vectors) -> None:
    for name, vectors in (("queries", query), ("pool", pool)):
        bad = np.flatnonzero(~np.isfinite(_lengths(vectors)))
        if bad.size:
            raise DataError(
                f"{bad.size} vectors of the {name} are not finite, the first is row {bad[0]}; "
                "the training has diverged"
            )


@contextlib.contextmanager
def _evaluation_mode(model: paddle.nn.Layer) -> Iterator[None]:
    before = [(layer, layer.training) for layer in model.sublayers(include_self=True)]
    model.eval()
    try:
        yield
    finally:
        for layer, training in before:
            layer.training = training
