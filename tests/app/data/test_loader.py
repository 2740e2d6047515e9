"""Batches: every rank its own pairs, all pairs once, in an order that seed and epoch decide."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_recompute.app.data import (
    Pair,
    PairLoader,
    PairTokenizer,
    Position,
    load_tokenizer,
    train_tokenizer,
)
from paddle_recompute.app.data.loader import RankSampler, distinct_batches, text_numbers
from paddle_recompute.errors import DataError
from tests.app.data import loaders

# The lengths differ from text to text.
PAIRS = [
    Pair(f"{number} " * (1 + number % 4), f"word {number} " * (1 + number % 3))
    for number in range(50)
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PairTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([text for pair in PAIRS for text in (pair.query, pair.positive)], path, 500)
    return load_tokenizer(path)


def loader_of(tokenizer: PairTokenizer, query: int = 8, positive: int = 10, **how: Any) -> Any:
    limits = {"data__max_query_tokens": query, "data__max_positive_tokens": positive}
    return loaders.loader_of(tokenizer, how.pop("pairs", PAIRS), **limits, **how)


def batches_of(loader: PairLoader) -> list[dict[str, list[Any]]]:
    return [{key: value.tolist() for key, value in batch.items()} for batch in loader]


shapes = st.tuples(st.integers(0, 60), st.integers(1, 5), st.integers(1, 4))


def deal(shape: tuple[int, int, int], seed: int, epoch: int) -> list[list[list[int]]]:
    """What each rank is dealt in one epoch: [rank][batch][row]."""
    num_pairs, local_batch, num_ranks = shape
    dealt = []
    for rank in range(num_ranks):
        sampler = RankSampler(
            num_pairs, local_batch=local_batch, rank=rank, num_ranks=num_ranks, seed=seed
        )
        dealt.append(list(sampler.batches(Position(epoch))))
        assert len(dealt[-1]) == len(sampler)
        assert sampler.num_dropped == num_pairs - len(sampler) * local_batch * num_ranks
    return dealt


@given(shape=shapes, seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 1000))
def test_ranks_share_the_pairs_and_none_is_read_twice(
    shape: tuple[int, int, int], seed: int, epoch: int
) -> None:
    num_pairs, local_batch, num_ranks = shape
    dealt = deal(shape, seed, epoch)
    assert len({len(batches) for batches in dealt}) == 1
    assert all(len(batch) == local_batch for batches in dealt for batch in batches)
    rows = [row for batches in dealt for batch in batches for row in batch]
    assert len(rows) == len(set(rows)) > num_pairs - local_batch * num_ranks
    assert set(rows) <= set(range(num_pairs))
    assert dealt == deal(shape, seed, epoch)


@given(seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 1000), other=st.integers(1, 1000))
def test_order_changes_with_seed_and_with_epoch(seed: int, epoch: int, other: int) -> None:
    shape = (40, 5, 2)
    assert deal(shape, seed, epoch) != deal(shape, seed, epoch + other)
    assert deal(shape, seed, epoch) != deal(shape, seed + other, epoch)


def test_order_is_the_same_everywhere() -> None:
    """Of every numpy and every machine: a resumed run may find others."""
    assert deal((10, 2, 2), seed=7, epoch=3) == [[[3, 5], [8, 0]], [[4, 7], [9, 2]]]


def test_batches_hold_the_tokens_of_their_pairs(tokenizer: PairTokenizer) -> None:
    loader = loader_of(tokenizer, rank=1, num_ranks=2)
    assert len(loader) == 6
    count = 0
    for batch in loader:
        assert set(batch) == {"query", "positive", "index"}
        assert all(isinstance(value, paddle.Tensor) for value in batch.values())
        assert all(value.dtype == paddle.int64 for value in batch.values())
        pairs = [PAIRS[place] for place in batch["index"].tolist()]
        for side, allowed in (("query", 8), ("positive", 10)):
            expected = tokenizer.encode([getattr(pair, side) for pair in pairs], allowed)
            np.testing.assert_array_equal(batch[side].numpy(), expected)
        count += 1
    assert count == 6


def test_epoch_counts_from_the_next_iteration(tokenizer: PairTokenizer) -> None:
    """An iteration can be left, and begun again."""
    loader = loader_of(tokenizer)
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        epochs.append(batches_of(loader))
    assert epochs[0] == epochs[2] != epochs[1]
    batches = iter(loader)
    first = next(batches)["index"].tolist()
    loader.set_epoch(1)
    assert batches_of(loader) == epochs[1]
    rest = [batch["index"].tolist() for batch in batches]
    assert [first, *rest] == [batch["index"] for batch in epochs[0]]


def test_no_draw_repeats_another() -> None:
    """NumPy takes the seeds [0, 2], [0, 2, 0] and [0, 2, 0, 0] for the same."""
    sampler = RankSampler(10, local_batch=2, rank=0, num_ranks=1, seed=0)
    streams = [np.random.default_rng([0, 2])]
    streams += [sampler.stream(2, *place) for place in [(0,), (1,), (0, 0), (1, 0), (0, 1)]]
    streams += [sampler.stream(0), sampler.stream(3, 0)]
    assert len({stream.integers(2**63) for stream in streams}) == len(streams)
    other = RankSampler(10, local_batch=1, rank=1, num_ranks=2, seed=0)
    assert other.stream(2, 0, 1).random() == sampler.stream(2, 0, 1).random()
    keys = np.concatenate([sampler.random(2, number, 5)[0] for number in range(3)])
    assert not np.isin(keys, np.random.default_rng([0, 2]).random(50)).any()


def test_what_is_left_out_is_told(tokenizer: PairTokenizer) -> None:
    loader = loader_of(tokenizer, 5, 6, num_ranks=3)
    queries = sum(len(tokenizer.encode([pair.query], 99)[0]) > 5 for pair in PAIRS)
    positives = sum(len(tokenizer.encode([pair.positive], 99)[0]) > 6 for pair in PAIRS)
    assert 0 < queries < 50
    assert 0 < positives < 50
    assert loader.notes() == [
        f"{queries} of 50 training queries are cut at data.max_query_tokens",
        f"{positives} of 50 training positives are cut at data.max_positive_tokens",
        "2 of 50 training pairs are left out, other ones in each epoch: they fill no global batch",
    ]


def test_unknown_words_are_told(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nword\n1\n2\n")
    pairs = [Pair("Ω", "word"), Pair("1", "word Ω"), Pair("Ω 2", "word")]
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    loader = loader_of(tokenizer, 9, pairs=pairs, local_batch=3)
    assert loader.notes() == [
        "2 of 3 training queries hold words outside the vocabulary",
        "1 of 3 training positives hold words outside the vocabulary",
    ]


def test_full_batches_and_too_few_pairs_for_one(tokenizer: PairTokenizer) -> None:
    assert loader_of(tokenizer, 99, 99, local_batch=5).notes() == []
    with pytest.raises(DataError, match=r"50 training pairs do not fill one batch of .* = 51;"):
        loader_of(tokenizer, local_batch=51)


# ------------------------------------------------------------------------------------ no duplicates


drawn_pairs = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=60)


def pairs_of(drawn: list[tuple[int, int]]) -> list[Pair]:
    # A query may equal a positive of another pair: that is no duplicate.
    return [Pair(f"text {query}", f"text {positive}") for query, positive in drawn]


def sampler_of(pairs: list[Pair], size: int, **changes: Any) -> RankSampler:
    settings: dict[str, Any] = {"local_batch": size, "rank": 0, "num_ranks": 1, "seed": 0}
    settings["texts"] = text_numbers(pairs)
    return RankSampler(len(pairs), **{**settings, **changes})


@given(drawn=drawn_pairs, size=st.integers(1, 8), seed=st.integers(0, 99), epoch=st.integers(0, 9))
def test_no_batch_has_a_text_twice_on_one_side(
    drawn: list[tuple[int, int]], size: int, seed: int, epoch: int
) -> None:
    pairs = pairs_of(drawn)
    sampler = sampler_of(pairs, size, seed=seed)
    batches = list(sampler.batches(Position(epoch)))
    assert len(batches) == len(sampler)
    assert sampler.num_dropped == len(pairs) - size * len(batches)
    for batch in batches:
        assert len({pairs[row].query for row in batch}) == size
        assert len({pairs[row].positive for row in batch}) == size
    order = np.random.default_rng([seed, epoch]).permutation(len(pairs))
    found = distinct_batches(order, text_numbers(pairs), size).ravel().tolist()
    assert len(found) == len(set(found))


def test_the_order_is_the_usual_one_but_for_pairs_that_wait() -> None:
    pairs = [Pair(f"q{number}", f"p{number}") for number in range(50)]
    usual = RankSampler(50, local_batch=8, rank=0, num_ranks=1, seed=3)
    sampler = sampler_of(pairs, 8, seed=3)
    for epoch in (0, 4):
        assert list(sampler.batches(Position(epoch))) == list(usual.batches(Position(epoch)))
    assert (len(sampler), sampler.num_dropped) == (len(usual), usual.num_dropped)
    pairs = [Pair(*pair.split()) for pair in ("a x", "a y", "b x", "c z", "d w", "e v")]
    found = distinct_batches(np.arange(6), text_numbers(pairs), 2)
    assert found.tolist() == [[0, 3], [1, 2], [4, 5]]


def test_an_epoch_with_fewer_batches_ends_with_those_of_the_first() -> None:
    """So that each epoch has as many, and a resumed run knows where it is."""
    pairs = pairs_of([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (2, 3), (3, 2)])
    numbers = text_numbers(pairs)
    counts = {}
    for seed in range(20):
        sampler = sampler_of(pairs, 2, seed=seed)
        first = list(sampler.batches(Position(0)))
        for epoch in range(20):
            order = np.random.default_rng([seed, epoch]).permutation(len(pairs))
            own = distinct_batches(order, numbers, 2).tolist()
            batches = list(sampler.batches(Position(epoch)))
            assert batches == (own + first[len(own) :])[: len(first)]
            counts[len(own) - len(first)] = counts.get(len(own) - len(first), 0) + 1
    assert min(counts) < 0 < max(counts)  # both happen here


# ------------------------------------------------------------------------------------- resume


def left_of_ranks(pairs: list[Pair], size: int, ranks: int, position: Position, **how: Any) -> Any:
    """The pairs of each global batch behind `position`, joined from those of the ranks."""
    of_ranks = [
        sampler_of(pairs, size // ranks, rank=rank, num_ranks=ranks, **how).batches(position)
        for rank in range(ranks)
    ]
    return [list(chain(*parts)) for parts in zip(*of_ranks, strict=True)]


@pytest.mark.parametrize("how", [{}, {"texts": None}], ids=["no_duplicates", "usual"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_resume_at_every_step_sees_the_same_pairs(ranks: int, how: dict[str, Any]) -> None:
    """Also with another batch: no pair of the epoch twice, and less than a batch of it missed."""
    pairs = pairs_of(np.random.default_rng(0).integers(0, 40, (60, 2)).tolist())
    for epoch in (0, 3):
        whole = left_of_ranks(pairs, 6, 1, Position(epoch), **how)
        assert len(whole) > 6
        for count in range(len(whole) + 1):
            position = Position(epoch, [(6, count)])
            assert left_of_ranks(pairs, 6, ranks, position, **how) == whole[count:]
            seen = [*chain(*whole[:count])]
            for size, steps in ((12, 1), (18, 1), (6, 99)):
                more = left_of_ranks(pairs, size, ranks, position, **how)[:steps]
                seen += chain(*more)
                for _ in more:
                    position.take(size)
            if how or not epoch:  # else an epoch may end with batches of the first
                assert len(seen) == len(set(seen))
            if how:
                assert len(seen) > len(pairs) - 6


def test_many_duplicates_take_little_time() -> None:
    """A step that looked at every waiting pair would take minutes."""
    pairs = [Pair("same" if number % 2 else f"q{number}", f"p{number}") for number in range(60_000)]
    assert len(sampler_of(pairs, 256)) == 117
