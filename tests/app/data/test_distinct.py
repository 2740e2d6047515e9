"""`data.no_duplicates`: no two pairs of a global batch have an equal query or positive."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paddle_recompute.app.data import Pair
from paddle_recompute.app.data.loader import RankSampler, distinct_batches, text_numbers

drawn_pairs = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=60)


def pairs_of(drawn: list[tuple[int, int]]) -> list[Pair]:
    # A query may equal a positive of another pair: that is no duplicate.
    return [Pair(f"text {query}", f"text {positive}") for query, positive in drawn]


def sampler_of(pairs: list[Pair], size: int, **changes: Any) -> RankSampler:
    settings: dict[str, Any] = {"local_batch": size, "rank": 0, "num_ranks": 1, "seed": 0}
    return RankSampler(len(pairs), texts=text_numbers(pairs), **{**settings, **changes})


@given(drawn=drawn_pairs, size=st.integers(1, 8), seed=st.integers(0, 99), epoch=st.integers(0, 9))
def test_no_batch_has_a_text_twice_on_one_side(
    drawn: list[tuple[int, int]], size: int, seed: int, epoch: int
) -> None:
    pairs = pairs_of(drawn)
    sampler = sampler_of(pairs, size, seed=seed)
    batches = list(sampler.batches(epoch))
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
        assert list(sampler.batches(epoch)) == list(usual.batches(epoch))
    assert (len(sampler), sampler.num_dropped) == (len(usual), usual.num_dropped)
    pairs = [Pair(*pair.split()) for pair in ("a x", "a y", "b x", "c z", "d w", "e v")]
    found = distinct_batches(np.arange(6), text_numbers(pairs), 2)
    assert found.tolist() == [[0, 3], [1, 2], [4, 5]]


def test_ranks_share_the_batches_of_one_process() -> None:
    random = np.random.default_rng(0)
    pairs = pairs_of(random.integers(0, 40, (200, 2)).tolist())
    alone = list(sampler_of(pairs, 12).batches(1))
    samplers = [sampler_of(pairs, 4, rank=rank, num_ranks=3) for rank in range(3)]
    parts = zip(*(sampler.batches(1) for sampler in samplers), strict=True)
    assert [list(chain(*part)) for part in parts] == alone


def test_an_epoch_with_fewer_batches_ends_with_those_of_the_first() -> None:
    """So that each epoch has as many, and a resumed run knows where it is."""
    pairs = pairs_of([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (2, 3), (3, 2)])
    numbers = text_numbers(pairs)
    counts = {}
    for seed in range(20):
        sampler = sampler_of(pairs, 2, seed=seed)
        first = list(sampler.batches(0))
        for epoch in range(20):
            order = np.random.default_rng([seed, epoch]).permutation(len(pairs))
            own = distinct_batches(order, numbers, 2).tolist()
            batches = list(sampler.batches(epoch))
            assert batches == (own + first[len(own) :])[: len(first)]
            counts[len(own) - len(first)] = counts.get(len(own) - len(first), 0) + 1
    assert min(counts) < 0 < max(counts)  # both happen here


def test_many_duplicates_take_little_time() -> None:
    """A step that looked at every waiting pair would take minutes."""
    pairs = [Pair("same" if number % 2 else f"q{number}", f"p{number}") for number in range(60_000)]
    assert len(sampler_of(pairs, 256)) == 117
