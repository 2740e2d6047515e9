"""Hard negatives: which texts each pair gets in an epoch.

The draw depends on seed, epoch, and the pair's place in the epoch's order, so it is the same with
any number of ranks, and a resumed run repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from paddle_recompute.app.data.pairs import Pair
from paddle_recompute.errors import DataError

Rows = npt.NDArray[np.int64]


class HardNegatives:
    """The negatives of all pairs, of which `count` are drawn for each pair.

    Args:
        pairs: All of the training.
        count: How many each pair gets.
        fill: Whether positives of other queries take the place of those that a pair lacks.

    Attributes:
        texts: All different.

    Raises:
        DataError: A pair has fewer than `count` and nothing fills in, or there are too few other
            texts.
    """

    def __init__(self, pairs: Sequence[Pair], count: int, *, fill: bool) -> None:
        self._count = count
        rows: dict[str, int] = {}
        given = [[rows.setdefault(text, len(rows)) for text in pair.negatives] for pair in pairs]
        self._given: list[Rows] = [np.array(list(dict.fromkeys(some)), np.int64) for some in given]
        self._most = max(map(len, self._given))
        short = [place for place, some in enumerate(self._given) if len(some) < count]
        if short and not fill:
            pair, found = pairs[short[0]], len(self._given[short[0]])
            raise DataError(
                f"{len(short)} pairs have fewer than contrastive.hard_negatives = {count} "
                f"different negatives, the first is that of the query {pair.query!r} with {found}; "
                "set contrastive.fill: random, or give more"
            )
        self._others = np.array([], np.int64)
        self._barred: dict[int, set[int]] = {}
        if short:
            others = dict.fromkeys(pair.positive for pair in pairs)
            self._others = np.array([rows.setdefault(text, len(rows)) for text in others], np.int64)
            positives: dict[str, set[int]] = {}
            for pair in pairs:
                positives.setdefault(pair.query, set()).add(rows[pair.positive])
            for place in short:
                barred = positives[pairs[place].query].union(self._given[place].tolist())
                self._barred[place] = barred
                if len(self._others) < len(barred) + count - len(self._given[place]):
                    raise DataError(
                        f"contrastive.fill: random: {len(self._others)} different positives are "
                        f"too few to give the query {pairs[place].query!r} "
                        f"contrastive.hard_negatives = {count} other texts; lower it or give more "
                        "pairs"
                    )
        self.texts: list[str] = list(rows)

    def draw(
        self,
        pairs: Sequence[int],
        random: npt.NDArray[np.float64],
        stream: Callable[[int], np.random.Generator],
    ) -> Rows:
        """The rows in `texts` of each pair's negatives, ``[pairs, count]``.

        Args:
            pairs: Their numbers.
            random: ``[pairs, keys]``, as many keys as `num_keys`: those with the least are taken.
            stream: Gives the random numbers for what is filled in, by the number of a pair.
        """
        drawn = np.empty((len(pairs), self._count), np.int64)
        for row, (pair, keys) in enumerate(zip(pairs, random, strict=True)):
            given = self._given[pair]
            chosen = given[np.argsort(keys[: len(given)], kind="stable")[: self._count]]
            drawn[row, : len(chosen)] = chosen
            if len(chosen) < self._count:
                drawn[row, len(chosen) :] = self._filled(pair, len(chosen), stream(pair))
        return drawn

    @property
    def num_keys(self) -> int:
        """The most negatives of a pair."""
        return self._most

    def _filled(self, pair: int, have: int, random: np.random.Generator) -> list[int]:
        found, barred = dict[int, None](), self._barred[pair]
        while len(found) < self._count - have:
            row = int(self._others[random.integers(len(self._others))])
            if row not in barred:
                found[row] = None
        return list(found)
