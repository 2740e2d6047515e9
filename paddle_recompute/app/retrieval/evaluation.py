"""Retrieval quality: encode texts, rank a pool for each query, recall@k and MRR.

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

from paddle_recompute.contrastive import agree_on_rows, gather_rows
from paddle_recompute.distributed import barrier, is_distributed, values_of_ranks
from paddle_recompute.errors import DataError, SyncError

Vectors = NDArray[np.floating[Any]]


class Tokenizer(Protocol):
    """What `encode_texts` calls on a tokenizer."""

    def encode(self, texts: list[str], max_tokens: int, /) -> NDArray[np.int64]:
        """Ids ``[len(texts), length]``, padded to the longest of these texts."""
        ...


def encode_texts(
    model: paddle.nn.Layer,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    max_tokens: int,
    batch_size: int,
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
    share = _Share.of_this_rank(over_ranks)
    share.check_equal("texts", np.frombuffer("\0".join(texts).encode(), np.uint8))
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    own = batches[share.rank :: share.num_ranks]
    vectors: NDArray[np.float32] | None = None
    with _evaluation_mode(model), paddle.no_grad():
        for rows in own or batches[:1]:  # a rank without a batch needs the dimension
            ids = tokenizer.encode([texts[row] for row in rows], max_tokens)
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
    target: NDArray[np.integer[Any]],
    *,
    ks: Sequence[int] = (1, 10),
    tile: int = 1024,
    over_ranks: bool = False,
) -> dict[str, float]:
    """Recall@k and MRR of the target when the pool is sorted by its score with the query.

    The rank of a target is the number of candidates that score at least as much, itself included:
    1 is best. A tie counts against the model, so a model that maps all texts to one vector gets
    the worst rank. Scores are inner products in float64. Two scores are equal if they differ by at
    most the rounding error of a sum of `dim` products. Otherwise the summation order of the matrix
    product would decide between equal candidates, and the rank would depend on `tile`.

    Memory: a few float64 blocks ``[tile, tile]`` and ``[tile, dim]``, never all scores.

    Args:
        query: ``[n, dim]``, floating point, n >= 1.
        pool: ``[m, dim]``, floating point, the candidates.
        target: ``[n]``, integer: the row in `pool` of each query's right answer.
        ks: The k of each recall@k, the share of queries whose target has a rank of at most k.
        tile: Queries and candidates per block.
        over_ranks: Every rank calls this with the same arrays and ranks a share of the queries;
            every rank gets the result for all queries.

    Returns:
        ``recall@k`` for every k and ``mrr``, the mean of 1/rank, all in [0, 1]; ``pool_size`` = m
        and ``queries`` = n, integers.

    Raises:
        DataError: Shapes or dtypes do not fit together, a target is no row of the pool, or a vector
            is not finite.
        SyncError: The ranks' arrays differ.
    """
    share = _Share.of_this_rank(over_ranks)
    share.check_equal("queries, pools or targets", query, pool, target)
    _check(query, pool, target, ks, tile)
    tiles = list(_tiles(len(query), tile))
    own = [
        _ranks(query[rows], pool, target[rows], tile)
        for rows in tiles[share.rank :: share.num_ranks]
    ]
    joined = share.join(np.concatenate([np.zeros(0, np.int64), *own]))
    # In query order again, so that the mean has the summation order of one process.
    ranks = np.empty(len(query), np.int64)
    for rank in range(share.num_ranks):
        for rows in tiles[rank :: share.num_ranks]:
            ranks[rows], joined = np.split(joined, [len(ranks[rows])])
    return {
        **{f"recall@{k}": float(np.mean(ranks <= k)) for k in ks},
        "mrr": float(np.mean(1.0 / ranks)),
        "pool_size": len(pool),
        "queries": len(query),
    }


def _ranks(
    query: Vectors, pool: Vectors, target: NDArray[np.integer[Any]], tile: int
) -> NDArray[np.int64]:
    """The rank of each query's target, 1 or more; `query` is one tile."""
    query, right = query.astype(np.float64), pool[target].astype(np.float64)
    query_length, right_length = _lengths(query), _lengths(right)
    # The rounding error of a sum of dim products is at most dim * 2**-53 * |q| * |p|.
    rounding = query.shape[1] * np.finfo(np.float64).eps / 2 * query_length
    threshold = np.einsum("nd,nd->n", query, right) - rounding * right_length
    ranks = np.zeros(len(query), np.int64)
    for rows in _tiles(len(pool), tile):
        candidates = pool[rows].astype(np.float64)
        scores = query @ candidates.T
        scores += np.outer(rounding, _lengths(candidates))
        ranks += np.count_nonzero(scores >= threshold[:, None], axis=1)
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
    target: NDArray[np.integer[Any]],
    ks: Sequence[int],
    tile: int,
) -> None:
    if query.ndim != 2 or pool.ndim != 2 or query.shape[1] != pool.shape[1]:
        raise DataError(
            f"received queries of shape {query.shape} and a pool of shape {pool.shape}; allowed "
            "are [n, dim] and [m, dim]"
        )
    if len(query) == 0 or target.shape != (len(query),) or target.dtype.kind not in "iu":
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


class _Share:
    """This rank's part of a list of pieces: every `num_ranks`-th, from the `rank`-th on."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks

    @classmethod
    def of_this_rank(cls, over_ranks: bool) -> _Share:
        if over_ranks and is_distributed():
            return cls(int(dist.get_rank()), int(dist.get_world_size()))
        return cls(0, 1)

    def check_equal(self, name: str, *parts: NDArray[Any]) -> None:
        """Check that all ranks have equal `parts`; joined results would mean nothing otherwise."""
        if self.num_ranks == 1:
            return
        checksum = 0
        for part in parts:
            about = f"{part.shape} {part.dtype}".encode()
            checksum = zlib.crc32(np.ascontiguousarray(part).data, zlib.crc32(about, checksum))
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
