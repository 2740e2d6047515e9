"""The split: no text on both sides, whatever the pairs; a function of the texts and the seed."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paddle_recompute.app.data import Pair, split_pairs
from paddle_recompute.app.data.split import (
    _groups,
    normal_form,
    num_pairs_sharing_a_text,
    without_duplicates,
)
from paddle_recompute.errors import DataError

# Few words, in many spellings: so that pairs share texts, in chains and across the two sides.
spelling = st.sampled_from(["{}", "{}!", " {}", "The {}", "the {}."])
word = st.builds(lambda form, place: form.format(f"wörd{place}"), spelling, st.integers(0, 30))
pairs = st.lists(st.builds(Pair, word, word), min_size=2, max_size=40)


def keys(some: list[Pair]) -> set[str]:
    return {normal_form(text) for pair in some for text in (pair.query, pair.positive)}


@given(pairs=pairs, valid_pairs=st.integers(1, 10), seed=st.integers(0, 3))
def test_no_text_is_on_both_sides_and_no_pair_is_lost(
    pairs: list[Pair], valid_pairs: int, seed: int
) -> None:
    try:
        split = split_pairs(pairs, valid_pairs=valid_pairs, seed=seed)
    except DataError:
        assume(False)
    assert keys(split.train).isdisjoint(keys(split.valid))
    assert 1 <= len(split.valid) <= valid_pairs
    assert split.train
    both = [*split.train, *split.valid]
    assert sorted(both, key=repr) == sorted(set(pairs), key=repr)
    assert len(both) + split.num_duplicates == len(pairs)
    assert len(_groups(both)) == len(components(both))


def components(some: list[Pair]) -> list[set[str]]:
    """The groups, by brute force: sets of texts, merged while any two touch."""
    sets: list[set[str]] = []
    for pair in some:
        own = keys([pair])
        touching = [one for one in sets if one & own]
        sets = [one for one in sets if not one & own] + [own.union(*touching)]
    return sets


@given(pairs=pairs, seed=st.integers(0, 3), shuffled=st.randoms(use_true_random=False))
def test_order_of_the_file_does_not_matter(pairs: list[Pair], seed: int, shuffled) -> None:  # type: ignore[no-untyped-def]
    try:
        split = split_pairs(pairs, valid_pairs=5, seed=seed)
    except DataError:
        assume(False)
    moved = list(pairs)
    shuffled.shuffle(moved)
    again = split_pairs(moved, valid_pairs=5, seed=seed)
    assert set(again.valid) == set(split.valid)
    assert set(again.train) == set(split.train)


def distinct(count: int) -> list[Pair]:
    return [Pair(f"q{place}", f"p{place}") for place in range(count)]


def test_seed_decides_and_a_new_line_does_not_reshuffle_the_others() -> None:
    splits = [split_pairs(distinct(100), valid_pairs=10, seed=seed) for seed in (0, 0, 1)]
    valid = [split.valid for split in splits]
    assert valid[0] == valid[1] != valid[2]
    assert all(len(side) == 10 for side in valid)
    for side in (splits[0].train, splits[0].valid):  # in the order of the file
        assert side == sorted(side, key=lambda pair: int(pair.query[1:]))
    after = split_pairs([*distinct(100), Pair("new", "new")], valid_pairs=10, seed=0).valid
    assert len({*valid[0]} & {*after}) >= 9


def test_group_that_is_too_large_stays_in_training() -> None:
    hub = [Pair(f"hub{place}", "same answer") for place in range(30)]
    split = split_pairs([*hub, *distinct(8)], valid_pairs=8, seed=0)
    assert set(split.train) == set(hub)


@pytest.mark.parametrize(
    ("one", "other", "is_one"),
    [
        ("The cat!", "the  CAT", True),
        ("Ｃａｔ", "cat", True),
        ("Straße", "STRASSE", True),
        ("猫，狗", "猫 狗", True),
        ("e\u0301t\u00e9", "\u00e9te\u0301", True),
        ("cat", "cats", False),
        ("!", "?", False),
        ("1 2", "12", False),
        ("कि", "का", False),
        ("é", "e", False),
    ],
)
def test_which_texts_are_one(one: str, other: str, is_one: bool) -> None:
    assert (normal_form(one) == normal_form(other)) == is_one


def test_duplicates_are_equal_pairs_and_no_others() -> None:
    some = [Pair("a", "b"), Pair("a", "b", ("c",)), Pair("a", "b"), Pair("A", "b")]
    assert without_duplicates(some) == ([some[0], some[1], some[3]], 1)


def test_pairs_sharing_a_text_are_counted() -> None:
    others = [Pair("a", "b"), Pair("c", "d")]
    some = [Pair("A.", "z"), Pair("y", "C"), Pair("x", "z")]
    assert num_pairs_sharing_a_text(some, others) == 2


def test_pairs_that_cannot_be_held_out() -> None:
    some = list(chain(distinct(5), distinct(5)))
    with pytest.raises(DataError, match=r"valid_pairs is 5, but there are only 5 different pairs"):
        split_pairs(some, valid_pairs=5, seed=0)
    some = [Pair(f"{place}", f"same {place % 2}") for place in range(100, 106)]
    with pytest.raises(DataError, match=r"valid_pairs is 2, but the smallest group .* has 3 pairs"):
        split_pairs(some, valid_pairs=2, seed=0)
