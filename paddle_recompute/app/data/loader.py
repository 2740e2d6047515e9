"""Batches of token ids: each rank reads its own pairs, in an order that seed and epoch decide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import paddle

from paddle_recompute.app.data.pairs import Pair
from paddle_recompute.app.data.tokenizer import PairTokenizer, TokenRows
from paddle_recompute.errors import DataError

_Arrays: TypeAlias = dict[str, npt.NDArray[np.int64]]


class PairLoader:
    """Iterates over the batches of one epoch on one rank; made by `build_loader`.

    A batch is a dict of int64 Tensors: ``query`` [local_batch, query tokens] and ``positive``
    [local_batch, positive tokens], each padded with 0 to its longest text, and ``index``
    [local_batch], the indices of the pairs in the given list.
    """

    def __init__(self, queries: TokenRows, positives: TokenRows, sampler: RankSampler) -> None:
        self._queries, self._positives = queries, positives
        self._sampler, self._epoch = sampler, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; the default is that of epoch 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches in an epoch, the same on all ranks; 0 if the pairs do not fill one."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[dict[str, paddle.Tensor]]:
        """The batches of the epoch that was set."""
        for rows in self._sampler.batches(self._epoch):
            yield {side: paddle.to_tensor(ids) for side, ids in self._collate(rows).items()}

    def notes(self) -> list[str]:
        """What the batches leave out, one sentence each; empty if nothing is left out."""
        counts = {
            "training queries are cut at data.max_query_tokens": self._queries.num_cut,
            "training positives are cut at data.max_positive_tokens": self._positives.num_cut,
            "training queries hold words beyond data.vocab_size": self._queries.num_unknown,
            "training positives hold words beyond data.vocab_size": self._positives.num_unknown,
            "training pairs, others in each epoch, are left out: they fill no global batch": (
                self._sampler.num_dropped
            ),
        }
        return [
            f"{count} of {self._sampler.num_pairs} {what}"
            for what, count in counts.items()
            if count
        ]

    def _collate(self, rows: list[int]) -> _Arrays:
        return {
            "query": self._queries.pad(rows),
            "positive": self._positives.pad(rows),
            "index": np.array(rows, dtype=np.int64),
        }


def build_loader(
    pairs: Sequence[Pair],
    tokenizer: PairTokenizer,
    *,
    local_batch: int,
    rank: int,
    num_ranks: int,
    seed: int,
    max_query_tokens: int,
    max_positive_tokens: int,
) -> PairLoader:
    """Tokenize all pairs once, and make the loader of one rank.

    The tokens stay in memory, 4 bytes each.

    Args:
        pairs: The same on every rank, in the same order.
        tokenizer: The same on every rank.
        local_batch: Pairs per batch of this rank.
        rank: This rank, from 0.
        num_ranks: Number of ranks.
        seed: Seed of the order of the pairs.
        max_query_tokens: The most tokens of a query, special tokens included.
        max_positive_tokens: The most tokens of a positive, special tokens included.

    Raises:
        DataError: A pair has negatives, which nothing uses yet.
    """
    refuse_negatives(pairs)
    return PairLoader(
        tokenizer.tokenize([pair.query for pair in pairs], max_query_tokens),
        tokenizer.tokenize([pair.positive for pair in pairs], max_positive_tokens),
        RankSampler(len(pairs), local_batch=local_batch, rank=rank, num_ranks=num_ranks, seed=seed),
    )


def refuse_negatives(pairs: Iterable[Pair]) -> None:
    """Raise if a pair has negatives, because training does not use them.

    Raises:
        DataError: Naming the first such pair and how many there are.
    """
    having = [pair for pair in pairs if pair.negatives]
    if having:
        raise DataError(
            f"{len(having)} pairs have negatives, the first is that of the query "
            f"'{having[0].query}'; training uses the other positives of a batch as negatives and "
            "ignores these: remove them from the file"
        )


class RankSampler:
    """Divides every global batch among the ranks, without repetition and in equal parts.

    `paddle.io.DistributedBatchSampler` repeats pairs to fill the last batch, and shuffles by the
    epoch alone, whatever the seed.

    The pairs are shuffled by (seed, epoch) and divided into global batches of ``num_ranks *
    local_batch``; each rank has a slice of each. So the pairs of a step do not depend on the number
    of ranks. The rest at the end is dropped (`num_dropped`).
    """

    def __init__(
        self, num_pairs: int, *, local_batch: int, rank: int, num_ranks: int, seed: int
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank is {rank}; allowed is 0 to {num_ranks - 1}")
        self.num_pairs = num_pairs
        self.num_dropped = num_pairs % (local_batch * num_ranks)
        self._local_batch, self._rank, self._num_ranks = local_batch, rank, num_ranks
        self._seed = seed

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.num_pairs // (self._local_batch * self._num_ranks)

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """The indices of the pairs of each batch of an epoch."""
        order = np.random.default_rng([self._seed, epoch]).permutation(self.num_pairs)
        whole = order[: self.num_pairs - self.num_dropped]
        for batch in whole.reshape(-1, self._num_ranks, self._local_batch)[:, self._rank]:
            yield batch.tolist()
