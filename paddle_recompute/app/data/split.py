"""Hold out pairs for evaluation so that no text, nor a near copy of it, is on both sides.

Two pairs belong together if they share a text: the same query, the same positive, or the query of
one is the positive of the other. Texts are compared in a normal form without case, punctuation
and width: "The cat!" and "the cat" are equal. Groups are the connected components; a group is held
out as a whole or not at all.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paddle_recompute.app.data.pairs import Pair
from paddle_recompute.errors import DataError


@dataclass(frozen=True)
class Split:
    """Pairs to train on and pairs to evaluate on.

    Attributes:
        train: In the given order, without duplicates.
        valid: In the given order, without duplicates.
        num_duplicates: Pairs that were left out because an equal pair came before.
    """

    train: list[Pair]
    valid: list[Pair]
    num_duplicates: int


def split_pairs(pairs: Iterable[Pair], *, valid_pairs: int, seed: int) -> Split:
    """Hold out `valid_pairs` pairs, by whole groups.

    The order of the groups depends on `seed` and on their texts only. So the order of the file does
    not matter, and a line that is added to the file moves no other pair to the other side, unless
    it joins two groups. A group that is larger than the number of pairs still to hold out is
    skipped: it stays in the training pairs.

    Args:
        pairs: All pairs. Negatives do not affect the groups.
        valid_pairs: The most pairs to hold out; fewer only if no group fits the rest.
        seed: Another seed holds out other groups.

    Raises:
        DataError: There are at most `valid_pairs` pairs, or every group is larger than that.

    Examples:
        >>> pairs = [Pair("猫", "cat"), Pair("貓", "Cat."), Pair("狗", "dog")]
        >>> split = split_pairs(pairs, valid_pairs=1, seed=0)
        >>> [pair.query for pair in split.valid]
        ['狗']
    """
    unique, num_duplicates = without_duplicates(pairs)
    if len(unique) <= valid_pairs:
        raise DataError(
            f"data.valid_pairs is {valid_pairs}, but there are only {len(unique)} different pairs; "
            "hold out fewer or give more pairs"
        )
    groups = _groups(unique)
    held_out: set[int] = set()
    for name in sorted(groups, key=lambda name: shuffling_key(name, seed)):
        if len(held_out) + len(groups[name]) <= valid_pairs:
            held_out.update(groups[name])
    if not held_out:
        raise DataError(
            f"data.valid_pairs is {valid_pairs}, but the smallest group of pairs that share a text "
            f"has {min(map(len, groups.values()))} pairs, which must be held out together; raise "
            "data.valid_pairs, or give the pairs to evaluate on in data.valid_file"
        )
    return Split(
        train=[pair for index, pair in enumerate(unique) if index not in held_out],
        valid=[pair for index, pair in enumerate(unique) if index in held_out],
        num_duplicates=num_duplicates,
    )


def without_duplicates(pairs: Iterable[Pair]) -> tuple[list[Pair], int]:
    """The pairs without duplicates of earlier pairs, and the number of duplicates."""
    every = list(pairs)
    unique = list(dict.fromkeys(every))
    return unique, len(every) - len(unique)


def digest_of(split: Split) -> str:
    """The SHA-256 of all texts of both sides, in their order."""
    digest = hashlib.sha256()
    for side in (split.train, split.valid):
        digest.update(len(side).to_bytes(8, "big"))
        for pair in side:
            digest.update(f"{pair.query}\0{pair.positive}\n".encode())
    return digest.hexdigest()


def num_pairs_sharing_a_text(pairs: Iterable[Pair], others: Iterable[Pair]) -> int:
    """How many of `pairs` share a text, in normal form, with `others`."""
    theirs = {key for pair in others for key in _keys(pair)}
    return sum(not theirs.isdisjoint(_keys(pair)) for pair in pairs)


def normal_form(text: str) -> str:
    """The form in which texts are compared: NFKC, case folded, only letters, marks and numbers.

    A text of punctuation only keeps it.

    Examples:
        >>> normal_form("Ｔhe  cat!") == normal_form("the CAT")
        True
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = folded.translate(_SEPARATORS).split() or folded.split()
    return " ".join(words)


def shuffling_key(text: str, seed: int) -> bytes:
    """A sort key that shuffles texts: a function of seed and text, the same on every machine."""
    return hashlib.blake2b(text.encode(), digest_size=8, salt=seed.to_bytes(16, "big")).digest()


class _Separators(dict[int, int | str]):
    """For `str.translate`: a space for every character that is not a letter, mark or number."""

    def __missing__(self, code: int) -> int | str:
        self[code] = code if unicodedata.category(chr(code))[0] in "LMN" else " "
        return self[code]


_SEPARATORS = _Separators()


def _keys(pair: Pair) -> tuple[str, str]:
    return normal_form(pair.query), normal_form(pair.positive)


def _groups(pairs: Sequence[Pair]) -> dict[str, list[int]]:
    """The indices in `pairs` of each group, by the group's first text in sorting order."""
    parents: dict[str, str] = {}
    for query, positive in (keys := [_keys(pair) for pair in pairs]):
        one, other = _root(parents, query), _root(parents, positive)
        parents[max(one, other)] = min(one, other)
    groups: dict[str, list[int]] = {}
    for index, (query, _) in enumerate(keys):
        groups.setdefault(_root(parents, query), []).append(index)
    return groups


def _root(parents: dict[str, str], key: str) -> str:
    """The representative of the set of `key` (union-find with path halving)."""
    parents.setdefault(key, key)
    while parents[key] != key:
        parents[key] = parents[parents[key]]
        key = parents[key]
    return key
