"""Batches of token ids: each rank reads its own pairs, in an order that seed and epoch decide; with
``data.no_duplicates`` no two pairs of a batch share an equal query or an equal positive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeInt, PositiveInt

from paddle_recompute.app.config import Config
from paddle_recompute.app.data.cedict import mined_cedict
from paddle_recompute.app.data.negatives import HardNegatives
from paddle_recompute.app.data.pairs import Pair
from paddle_recompute.app.data.prepare import (
    Account,
    PreparedData,
    build_pool,
    check_vocabulary,
    read_file,
    read_split,
)
from paddle_recompute.app.data.tokenizer import TokenRows
from paddle_recompute.errors import DataError

if TYPE_CHECKING:
    import paddle

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


@dataclass
class Position:
    """Where a run is in its pairs: whatever batches it goes on with, it sees no pair twice.

    Attributes:
        epoch: Counted from 0.
        taken: Of this epoch: the pairs of a global batch, and how many such batches, in order.
    """

    epoch: NonNegativeInt = 0
    taken: list[tuple[PositiveInt, NonNegativeInt]] = field(default_factory=list)

    def take(self, size: int) -> None:
        """A global batch of `size` pairs was read."""
        if not self.taken or self.taken[-1][0] != size:
            self.taken.append((size, 0))
        self.taken[-1] = size, self.taken[-1][1] + 1


_CUT_AS = "negatives", "positive"
_Arrays: TypeAlias = dict[str, npt.NDArray[np.int64]]


class PairLoader:
    """Iterates over the batches of one epoch on one rank; made by `build_loader`.

    A batch is a dict of int64 Tensors: ``query`` [local_batch, query tokens] and ``positive``
    [local_batch, positive tokens], each padded with 0 to its longest text, and ``index``
    [local_batch], the indices of the pairs in the given list. With hard negatives also
    ``negatives`` [local_batch, hard_negatives, tokens], with ids also ``positive_ids``
    [local_batch] and ``negative_ids`` [local_batch, hard_negatives]: equal texts have equal ids;
    with ``contrastive.positives`` ``query_ids`` [local_batch].
    """

    def __init__(
        self,
        texts: dict[str, TokenRows],
        ids: dict[str, npt.NDArray[np.int64]],
        negatives: HardNegatives | None,
        sampler: RankSampler,
    ) -> None:
        self._texts, self._ids, self._negatives = texts, ids, negatives
        self._sampler, self._position = sampler, Position()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; the default is that of epoch 0."""
        self._position = Position(epoch)

    def go_to(self, position: Position) -> int:
        """Begin the next iteration behind the batches of `position`; returns how many are left."""
        self._position = replace(position, taken=[*position.taken])
        return len(self._sampler.left(self._position))

    def position_after(self, steps: int, size: int) -> Position:
        """The position after `steps` global batches of `size` pairs."""
        epoch, count = divmod(steps, max(1, len(self._sampler.global_batches(0, size))))
        return Position(epoch, [(size, count)])

    def __len__(self) -> int:
        """Batches in an epoch, the same on all ranks."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[dict[str, paddle.Tensor]]:
        """The batches of the epoch that was set, or those that are left of it."""
        import paddle

        position = self._position
        done = sum(count for _, count in position.taken)
        for number, rows in enumerate(self._sampler.batches(position), done):
            batch = self._collate(rows, position.epoch, number)
            yield {side: paddle.to_tensor(ids) for side, ids in batch.items()}

    def notes(self) -> list[str]:
        """What the batches leave out, one sentence each; empty if nothing is left out."""
        kinds = {"query": "queries", "positive": "positives", "negatives": "negatives"}
        counts = [
            (texts.num_cut, side, f"are cut at data.max_{side.replace(*_CUT_AS)}_tokens")
            for side, texts in self._texts.items()
        ]
        counts += [
            (texts.num_unknown, side, "hold words outside the vocabulary")
            for side, texts in self._texts.items()
        ]
        notes = [
            f"{count} of {len(self._texts[side].starts) - 1} training {kinds[side]} {what}"
            for count, side, what in counts
            if count
        ]
        if dropped := self._sampler.num_dropped:
            notes.append(
                f"{dropped} of {self._sampler.num_pairs} training pairs are left out, other "
                f"ones in each epoch: they fill no global batch{self._sampler.why_dropped}"
            )
        return notes

    def lengths(self) -> dict[str, dict[str, Any]]:
        """Of the texts of each side: ``counts`` (how many have 0, 1, 2, ... tokens),
        ``mean``, ``longest``, ``cut``, ``unknown`` (how many were cut, or have unknown words).
        """
        found: dict[str, dict[str, Any]] = {}
        for side, rows in self._texts.items():
            lengths = np.diff(rows.starts)
            found[side] = {
                "counts": np.bincount(lengths).tolist(),
                "mean": float(lengths.mean()),
                "longest": int(lengths.max()),
                "cut": rows.num_cut,
                "unknown": rows.num_unknown,
            }
        return found

    def _collate(self, rows: list[int], epoch: int, number: int) -> _Arrays:
        batch = {side: self._texts[side].pad(rows) for side in ("query", "positive")}
        batch["index"] = np.array(rows, dtype=np.int64)
        ids = {"query": batch["index"], "positive": batch["index"]}
        if self._negatives is not None:
            keys = self._sampler.random(epoch, number, self._negatives.num_keys)
            stream = partial(self._sampler.stream, epoch, number)
            drawn = self._negatives.draw(rows, keys, stream)
            padded = self._texts["negatives"].pad(drawn.ravel())
            batch["negatives"] = padded.reshape(*drawn.shape, -1)
            ids["negative"] = drawn
        return batch | {f"{side}_ids": self._ids[side][ids[side]] for side in self._ids}


def build_loader(
    config: Config, data: PreparedData, rank: int, *, local_batch: int | None = None
) -> PairLoader:
    """Tokenize all training texts once, and make the loader of `rank`.

    The tokens stay in memory, 4 bytes each.

    Args:
        config: Of the run.
        data: The same on every rank.
        rank: This rank, from 0.
        local_batch: Pairs of a rank in a batch; None: as many as `config` says.

    Raises:
        DataError: A pair has too few negatives, or the pairs do not fill one batch.
    """
    section, limits, pairs = config.contrastive, config.data, data.train
    of_query, of_document = config.model.prompts

    def tokenized(prompt: str, texts: Iterable[str], longest: int) -> TokenRows:
        return data.tokenizer.tokenize([prompt + text for text in texts], longest)

    longest = limits.max_positive_tokens
    texts = {
        "query": tokenized(of_query, (row.query for row in pairs), limits.max_query_tokens),
        "positive": tokenized(of_document, (row.positive for row in pairs), longest),
    }
    negatives, sampler = _drawn_and_sampled(config, pairs, rank, local_batch)
    if negatives is not None:
        texts["negatives"] = tokenized(of_document, negatives.texts, longest)
    from paddle_recompute.contrastive import text_ids

    ids = {}
    if section.positives != "one":
        ids["query"] = text_ids(pair.query for pair in pairs).numpy()
    if section.mask_false_negatives:
        ids["positive"] = text_ids(pair.positive for pair in pairs).numpy()
        if negatives is not None:
            ids["negative"] = text_ids(negatives.texts).numpy()
    return PairLoader(texts, ids, negatives, sampler)


def _drawn_and_sampled(
    config: Config, pairs: Sequence[Pair], rank: int, local_batch: int | None = None
) -> tuple[HardNegatives | None, RankSampler]:
    section, is_apart = config.contrastive, config.data.no_duplicates
    negatives = None
    if section.hard_negatives:
        negatives = HardNegatives(pairs, section.hard_negatives, fill=section.fill == "random")
    sampler = RankSampler(
        len(pairs),
        local_batch=local_batch or config.local_batch,
        rank=rank,
        num_ranks=config.world_size,
        seed=config.train.seed,
        texts=text_numbers(pairs) if is_apart else None,
    )
    if len(sampler) == 0:
        why = "; data.no_duplicates: true puts no query or positive into a batch twice"
        raise DataError(
            f"{len(pairs)} training pairs do not fill one batch of contrastive.global_batch = "
            f"{section.global_batch}; give more pairs or lower it" + (why if is_apart else "")
        )
    return negatives, sampler


def check_files(config: Config, *, whole: bool = False) -> None:
    """Read the pairs and the tokenizer of a configuration, without Paddle, and keep nothing.

    Args:
        config: Of a run.
        whole: Whether the pairs are also held out, pooled and put into batches, which takes about
            as long as reading them.

    Raises:
        DataError: A file or a line in it cannot be used, or there are too few pairs.
        ConfigError: The weights have no tokenizer, or another one.
        CheckpointError: There are no weights.
        DependencyError: A package that the source needs is not installed.
    """
    data, account = config.data, Account()
    of_model = (config.model.init_from, config.model.positive_from)
    if all(place is None or place.exists() for place in of_model):  # a resumed run needs none
        check_vocabulary(config)
    file = data.train_file or mined_cedict(data.cache_dir)
    if not whole:
        for name in ("train_file", "valid_file"):
            if (path := getattr(data, name)) is not None:
                read_file(data, name, path, account, config.contrastive.negatives_of_a_line)
    elif data.train_file is not None or file.exists():
        split = read_split(config, file, account)
        build_pool(split, data.pool_size, config.train.seed)
        _drawn_and_sampled(config, split.train, 0)


class RankSampler:
    """Divides every global batch among the ranks, without repetition and in equal parts.

    `paddle.io.DistributedBatchSampler` repeats pairs to fill the last batch, and shuffles by the
    epoch alone, whatever the seed.

    The pairs are shuffled by (seed, epoch) and divided into global batches of ``num_ranks *
    local_batch``; each rank has a slice of each. So the pairs of a step do not depend on the number
    of ranks. The rest at the end is dropped (`num_dropped`).

    With `texts`, numbers of the texts of each pair, ``[num_pairs, 2]``, no two pairs of a global
    batch have an equal one (`distinct_batches`). Every epoch has as many batches as epoch 0. Those
    that the order of an epoch does not yield are taken from epoch 0.
    """

    def __init__(
        self,
        num_pairs: int,
        *,
        local_batch: int,
        rank: int,
        num_ranks: int,
        seed: int,
        texts: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.num_pairs = num_pairs
        self._local_batch, self._rank, self._num_ranks = local_batch, rank, num_ranks
        self._seed, self._texts = seed, texts
        self._size = local_batch * num_ranks
        self._first = self.global_batches(0, self._size)
        self.num_dropped = num_pairs - self._first.size
        self.why_dropped = " without an equal query or positive" if texts is not None else ""

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._first)

    def batches(self, position: Position) -> Iterator[list[int]]:
        """The indices of the pairs of each batch of an epoch that is left after `position`."""
        whole = self.left(position)
        for batch in whole.reshape(-1, self._num_ranks, self._local_batch)[:, self._rank]:
            yield batch.tolist()

    def left(self, position: Position) -> Rows:
        """``[batches, pairs]``: the global batches of an epoch after those that were taken."""
        epoch, taken = position.epoch, position.taken
        if {self._size}.issuperset(size for size, _ in taken):
            found = self.global_batches(epoch, self._size)[: len(self)]
            whole = np.concatenate([found, self._first[len(found) :]])
            return whole[sum(count for _, count in taken) :]
        seen = np.empty(0, np.int64)
        for size, count in taken:
            seen = np.append(seen, self.global_batches(epoch, size, without=seen)[:count])
        return self.global_batches(epoch, self._size, without=seen)

    def global_batches(self, epoch: int, size: int, without: Rows | None = None) -> Rows:
        """``[batches, size]``, as many as the order of `epoch` yields, `without` some pairs."""
        order = np.random.default_rng([self._seed, epoch]).permutation(self.num_pairs)
        if without is not None:
            order = order[~np.isin(order, without)]
        if self._texts is not None:
            return distinct_batches(order, self._texts, size)
        return order[: len(order) // size * size].reshape(-1, size)

    def random(self, epoch: int, number: int, count: int) -> npt.NDArray[np.float64]:
        """`count` random numbers for each pair of a batch; the number of ranks does not matter."""
        every = self._num_ranks * self._local_batch
        drawn = self.stream(epoch, number).random((every, count))
        first = self._rank * self._local_batch
        return drawn[first : first + self._local_batch]

    def stream(self, epoch: int, *place: int) -> np.random.Generator:
        """A random stream for a `place` in an epoch; no other place shares it, nor does the order.

        A place as one more seed would not do: NumPy fills up short seeds with zeros.
        """
        seed = np.random.SeedSequence([self._seed, epoch], spawn_key=place)
        return np.random.default_rng(seed)
