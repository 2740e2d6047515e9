"""The best recall that the tokens of the held-out texts allow.

Two texts with the same tokens have the same vector, whatever the model learns. `retrieval_metrics`
counts a tie against the model, so such a text never has rank 1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from paddle_recompute.app.data.tokenizer import TokenRows


@dataclass(frozen=True)
class Ceiling:
    """The upper bound of recall@1, and its reasons.

    Attributes:
        unknown_queries: Held-out queries without any token but ``[UNK]``.
        equal_queries: Held-out queries with the tokens of a query that has another answer.
        equal_answers: Held-out queries whose answer has, after cutting, the tokens of another
            candidate.
        best_recall: The largest possible recall@1.
    """

    unknown_queries: int
    equal_queries: int
    equal_answers: int
    best_recall: float

    def to_dict(self) -> dict[str, float]:
        """The values for the final record, where ``best_recall`` is ``recall@1_ceiling``."""
        values = asdict(self)
        values["recall@1_ceiling"] = values.pop("best_recall")
        return values

    def notes(self) -> list[str]:
        """Sentences for the user; none if recall@1 of 1 is possible."""
        counts = (
            (self.unknown_queries, "held-out queries have no token but [UNK]"),
            (self.equal_queries, "held-out queries have the tokens of a query with another answer"),
            (self.equal_answers, "answers have, after cutting, the tokens of another candidate"),
        )
        notes = [f"{count:,} {what}" for count, what in counts if count]
        best = f"no model can have a recall@1 above {self.best_recall:.4f} on these texts"
        return [*notes, best] if notes else []


def ceiling(
    queries: TokenRows, candidates: TokenRows, target: Sequence[int], *, unknown: int | None
) -> Ceiling:
    """Count the held-out texts that their tokens do not distinguish.

    Args:
        queries: The query of each held-out pair, cut to the limit of the model.
        candidates: The pool, cut in the same way.
        target: The row in the pool of each query's answer.
        unknown: The id of ``[UNK]``.
    """
    read, pool = list(_rows(queries)), list(_rows(candidates))
    times = Counter(pool)
    answers = [pool[place] for place in target]
    wanted: dict[bytes, Counter[int]] = defaultdict(Counter)
    for tokens, place in zip(read, target, strict=True):
        wanted[tokens][place] += 1
    # All queries with these tokens have one vector. One answer can be the nearest to it, and it has
    # rank 1 only if no other candidate is equally near.
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
    """Whether all tokens between ``[CLS]`` and ``[SEP]``, at least one, are ``[UNK]``."""
    words = np.frombuffer(tokens, np.int32)[1:-1]
    return bool(words.size and (words == unknown).all())


def _rows(texts: TokenRows) -> Iterator[bytes]:
    for first, last in zip(texts.starts[:-1], texts.starts[1:], strict=True):
        yield texts.ids[first:last].tobytes()
