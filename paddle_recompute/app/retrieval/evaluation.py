"""Retrieval quality: encode texts, and rank a pool for each query.

On several ranks, each rank computes a share of the batches and of the query tiles of one process.
No batch or tile is split, so the operands are the same and the result equals that of one process
bit by bit.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import paddle
import paddle.distributed as dist
from numpy.typing import NDArray

from paddle_recompute.app.retrieval.metrics import Judgements, metrics_of_ranks
from paddle_recompute.contrastive import agree_on_rows, gather_rows
from paddle_recompute.distributed import barrier, is_distributed, values_of_ranks
from paddle_recompute.errors import DataError, SyncError

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
    share = Share.of_this_rank(over_ranks)
    share.check_equal("texts", np.frombuffer("\0".join(texts).encode(), np.uint8))
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    own = batches[share.rank :: share.num_ranks]
    vectors: NDArray[np.float32] | None = None
    with _evaluation_mode(model), paddle.no_grad():
        # As many on all ranks: a model may be spread over them (recompute.offload_parameters).
        for rows in [*own, batches[0]][: -(-len(batches) // share.num_ranks)]:
            ids = tokenizer.encode([prompt + texts[row] for row in rows], max_tokens)
            batch = model(paddle.to_tensor(ids)).astype("float32").numpy()
            if vectors is None:
                vectors = np.empty((len(texts), batch.shape[1]), np.float32)
            norm = np.linalg.norm(batch, axis=1, keepdims=True)
            vectors[rows] = batch / np.maximum(norm, np.finfo(np.float32).tiny)
            if progress is not None:
                progress(len(rows))
    assert vectors is not None
    if share.num_ranks > 1:
        joined = share.join(vectors[list(itertools.chain.from_iterable(own))])
        shares = (batches[rank :: share.num_ranks] for rank in range(share.num_ranks))
        places = itertools.chain.from_iterable(itertools.chain.from_iterable(shares))
        vectors[list(places)] = joined
    return vectors


def retrieval_metrics(
    query: Vectors,
    pool: Vectors,
    target: NDArray[np.integer[Any]] | Judgements,
    *,
    ks: Sequence[int] = (1, 10),
    tile: int = 1024,
    excluded: NDArray[np.integer[Any]] | None = None,
    over_ranks: bool = False,
) -> dict[str, float]:
    """The metrics of `metrics` when the pool is sorted by its score with the query.

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
        over_ranks: Every rank calls this with the same arrays and ranks a share of the queries;
            every rank gets the result for all queries.

    Returns:
        ``recall@k`` and ``precision@k`` for every k, ``ndcg@10``, ``map`` and ``mrr``, all in
        [0, 1]; ``pool_size`` = m and ``queries`` = n, integers.

    Raises:
        DataError: Shapes or dtypes do not fit together, an answer is no row of the pool or
            excluded, or a vector is not finite.
        SyncError: The ranks' arrays differ.
    """
    share = Share.of_this_rank(over_ranks)
    without = np.full(len(query), -1) if excluded is None else excluded
    arrays: list[NDArray[Any]]
    if isinstance(target, Judgements):
        arrays = [target.query, target.candidate, target.grade]
    else:
        arrays = [target]
    share.check_equal("queries, pools or targets", query, pool, without, *arrays)
    _check(query, pool, target, ks, tile)
    judged = target if isinstance(target, Judgements) else Judgements.single(target)
    if np.any(without[judged.query] == judged.candidate):
        raise DataError("an answer is excluded from the candidates of its query; leave one out")
    tiles = [(part, judged.of_queries(part.start, part.stop)) for part in _tiles(len(query), tile)]
    own = [
        _ranks(
            query[part],
            pool,
            judged.query[of] - part.start,
            judged.candidate[of],
            without[part],
            tile,
        )
        for part, of in tiles[share.rank :: share.num_ranks]
    ]
    joined = share.join(np.concatenate([np.zeros(0, np.int64), *own]))
    # In query order again, so that the mean has the summation order of one process.
    ranks = np.empty(len(judged.query), np.int64)
    for rank in range(share.num_ranks):
        for _, of in tiles[rank :: share.num_ranks]:
            ranks[of], joined = np.split(joined, [len(ranks[of])])
    return {**metrics_of_ranks(ranks, judged, ks), "pool_size": len(pool)}


def _ranks(
    query: Vectors,
    pool: Vectors,
    of: NDArray[np.int64],
    target: NDArray[np.integer[Any]],
    without: NDArray[np.integer[Any]],
    tile: int,
) -> NDArray[np.int64]:
    """The rank of each answer `target` of the query `of`, 1 or more; `query` is one tile."""
    query, right = query.astype(np.float64), pool[target].astype(np.float64)
    # The rounding error of a sum of dim products is at most dim * 2**-53 * |q| * |p|.
    rounding = query.shape[1] * np.finfo(np.float64).eps / 2 * _lengths(query)
    threshold = np.einsum("nd,nd->n", query[of], right) - rounding[of] * _lengths(right)
    ranks = np.zeros(len(target), np.int64)
    for rows in _tiles(len(pool), tile):
        candidates = pool[rows].astype(np.float64)
        scores = query @ candidates.T
        scores += np.outer(rounding, _lengths(candidates))
        inside = np.flatnonzero((without >= rows.start) & (without < rows.stop))
        scores[inside, without[inside] - rows.start] = -np.inf
        for some in _tiles(len(target), tile):
            better = scores[of[some]] >= threshold[some, None]
            ranks[some] += np.count_nonzero(better, axis=1)
    return ranks


def _tiles(total: int, tile: int) -> Iterator[slice]:
    for first in range(0, total, tile):
        yield slice(first, first + tile)


def _lengths(vectors: Vectors) -> NDArray[np.float64]:
    squares: NDArray[np.float64] = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    return np.sqrt(squares)


def _check(
    query: Vectors,
    pool: Vectors,
    target: NDArray[np.integer[Any]] | Judgements,
    ks: Sequence[int],
    tile: int,
) -> None:
    if query.ndim != 2 or pool.ndim != 2 or query.shape[1] != pool.shape[1]:
        raise DataError(
            f"received queries of shape {query.shape} and a pool of shape {pool.shape}; allowed "
            "are [n, dim] and [m, dim]"
        )
    if isinstance(target, Judgements):
        answered = np.unique(target.query)
        if not len(query) or not np.array_equal(answered, np.arange(len(query))):
            raise DataError(
                f"received {len(query)} queries, and answers to {len(answered)}; each of at least "
                "one query needs an answer"
            )
        target = target.candidate
    elif len(query) == 0 or target.shape != (len(query),) or target.dtype.kind not in "iu":
        raise DataError(
            f"received {len(query)} queries and targets of shape {target.shape}, {target.dtype}; "
            "allowed is one integer for each of at least one query"
        )
    if target.min() < 0 or target.max() >= len(pool):
        raise DataError(
            f"received targets from {target.min()} to {target.max()}; allowed are the rows of the "
            f"pool, 0 to {len(pool) - 1}"
        )
    if tile < 1 or any(k < 1 for k in ks):
        raise DataError(f"received ks={tuple(ks)} and tile={tile}; all must be at least 1")
    for name, vectors in (("queries", query), ("pool", pool)):
        bad = np.flatnonzero(~np.isfinite(_lengths(vectors)))
        if bad.size:
            raise DataError(
                f"{bad.size} vectors of the {name} are not finite, the first is row {bad[0]}; "
                "the training has diverged"
            )


class Share:
    """This rank's part of a list of pieces: every `num_ranks`-th, from the `rank`-th on."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    @classmethod
    def of_this_rank(cls, over_ranks: bool) -> Share:
        if over_ranks and is_distributed():
            return cls(int(dist.get_rank()), int(dist.get_world_size()))
        return cls(0, 1)

    def check_equal(self, name: str, *parts: NDArray[Any]) -> None:
        """Check that all ranks have equal `parts`; joined results would mean nothing otherwise."""
        if self.num_ranks == 1:
            return
        checksum = 0
        for part in parts:
            kind = f"{part.shape} {part.dtype}".encode()
            checksum = zlib.crc32(np.ascontiguousarray(part).data, zlib.crc32(kind, checksum))
        if len(set(values_of_ranks(checksum, f"the checksum of {name}"))) > 1:
            raise SyncError(
                f"the ranks' {name} differ; with over_ranks=True all ranks need the same"
            )

    def join(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The rows of all ranks, in the order of the ranks."""
        if self.num_ranks == 1:
            return rows
        barrier()  # ranks may be minutes apart here, and gloo waits at most 30 s
        tensor = paddle.to_tensor(rows)
        (joined,) = gather_rows([tensor], agree_on_rows([tensor], None), None)
        array: NDArray[Any] = joined.numpy()
        return array


@contextlib.contextmanager
def _evaluation_mode(model: paddle.nn.Layer) -> Iterator[None]:
    before = [(layer, layer.training) for layer in model.sublayers(include_self=True)]
    model.eval()
    try:
        yield
    finally:
        for layer, training in before:
            layer.training = training
