"""What the tokens of the held-out texts allow at best: how many of them nothing can tell apart.

Two texts with the same tokens have the same vector, whatever the model learns. `retrieval_metrics`
counts a tie against the model, so such a text is never found first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from paddle_recompute.data.tokenizer import TokenRows


@dataclass(frozen=True)
class Ceiling:
    """How far retrieval can get with these tokens.

    Attributes:
        unknown_queries: Held-out queries without any token but ``[UNK]``.
        equal_queries: Held-out queries whose tokens are those of a query that looks for another
            answer.
        equal_answers: Held-out queries whose answer has, after cutting, the tokens of another
            candidate.
        best_recall: No model has a larger recall@1.
    """

    unknown_queries: int
    equal_queries: int
    equal_answers: int
    best_recall: float

    def to_dict(self) -> dict[str, float]:
        """For the final record; ``best_recall`` is ``recall@1_ceiling`` there."""
        values = asdict(self)
        return {**values, "recall@1_ceiling": values.pop("best_recall")}

    def notes(self) -> list[str]:
        """Sentences for the user; none where nothing is lost."""
        counts = (
            (self.unknown_queries, "held-out queries are [UNK] alone"),
            (self.equal_queries, "held-out queries share their tokens with one of another answer"),
            (self.equal_answers, "answers share their tokens, as they are cut, with a candidate"),
        )
        notes = [f"{count} {what}" for count, what in counts if count]
        return [*notes, f"so recall@1 is at most {self.best_recall:.4f}"] if notes else []


def ceiling(
    queries: TokenRows, candidates: TokenRows, target: Sequence[int], *, unknown: int | None
) -> Ceiling:
    """Count what the tokens of an evaluation leave undecided.

    Args:
        queries: One for each held-out pair, cut as the model reads it.
        candidates: The pool, likewise.
        target: The place in the pool of each query's answer.
        unknown: The number of ``[UNK]``.
    """
    read, pool = list(_rows(queries)), list(_rows(candidates))
    times = Counter(pool)
    answers = [pool[place] for place in target]
    wanted: dict[bytes, Counter[int]] = defaultdict(Counter)
    for tokens, place in zip(read, target, strict=True):
        wanted[tokens][place] += 1
    # One vector for all queries with these tokens: one answer can be the nearest to it, and is
    # found first only if no other candidate is as near.
    found = sum(
        max((count for place, count in places.items() if times[pool[place]] == 1), default=0)
        for places in wanted.values()
    )
    return Ceiling(
        unknown_queries=sum(_is_unknown(one, unknown) for one in read),
        equal_queries=sum(len(wanted[tokens]) > 1 for tokens in read),
        equal_answers=sum(times[answer] > 1 for answer in answers),
        best_recall=found / max(1, len(read)),
    )


def _is_unknown(tokens: bytes, unknown: int | None) -> bool:
    """Whether there is nothing but ``[UNK]``, once at least, between ``[CLS]`` and ``[SEP]``."""
    words = np.frombuffer(tokens, np.int32)[1:-1]
    return bool(words.size and (words == unknown).all())


def _rows(texts: TokenRows) -> Iterator[bytes]:
    for first, last in zip(texts.starts[:-1], texts.starts[1:], strict=True):
        yield texts.ids[first:last].tobytes()
