r"""Retrieval metrics from the ranks of the answers: recall, precision, nDCG, MAP and MRR.

Each is the mean over the queries. Of a query with the answers :math:`a` at the ranks :math:`r_a`,
of the grades :math:`g_a`:

- ``recall@k``: the share of its answers with :math:`r_a \le k`;
- ``precision@k``: their number, divided by k;
- ``ndcg@k``: the sum of :math:`g_a / \log_2(r_a + 1)` over them, divided by the largest possible;
- ``map``: the mean of (answers at rank :math:`r_a` or before) / :math:`r_a`, over all answers;
- ``mrr``: 1 / the least :math:`r_a`.

These are the definitions of trec_eval (Jarvelin and Kekalainen, "Cumulated Gain-Based Evaluation
of IR Techniques", TOIS 20(4), 2002, for nDCG), on the ranking of all candidates.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paddle_recompute.errors import DataError

Ints = NDArray[np.int64]
NDCG_AT = 10


@dataclass(frozen=True)
class Judgements:
    """The answers of the queries. One row is one answer of one query; a query has at least one.

    Attributes:
        query: ``[answers]``, int64, ascending: the number of the query.
        candidate: ``[answers]``, int64: the answer's row in the pool.
        grade: ``[answers]``, int64, at least 1; higher is better.
    """

    query: Ints
    candidate: Ints
    grade: Ints

    @classmethod
    def of(cls, answers: Sequence[Mapping[int, int]]) -> Judgements:
        """From the grade of each answer, by its row in the pool, for each query."""
        rows = [(query, *item) for query, some in enumerate(answers) for item in some.items()]
        columns = np.array(rows, np.int64).reshape(-1, 3).T
        return cls(*columns)

    @classmethod
    def single(cls, target: NDArray[np.integer[Any]]) -> Judgements:
        """One answer for each query, `target` ``[queries]``, of grade 1.

        Raises:
            DataError: `target` has another type or shape.
        """
        if target.ndim != 1 or target.dtype.kind not in "iu":
            raise DataError(
                f"received targets of shape {target.shape}, {target.dtype}; allowed is one integer "
                "for each query"
            )
        count = len(target)
        return cls(np.arange(count), target.astype(np.int64), np.ones(count, np.int64))

    def of_queries(self, first: int, last: int) -> slice:
        """The rows of the queries `first` to before `last`."""
        start, stop = np.searchsorted(self.query, [first, last])
        return slice(int(start), int(stop))


def metrics_of_ranks(ranks: Ints, judged: Judgements, ks: Sequence[int]) -> dict[str, float]:
    """The metrics of the module, and ``queries``, their number.

    Args:
        ranks: ``[answers]``: the number of candidates that score at least as much as the answer,
            itself included. Answers of the same query may be among them: of equal ones, that with
            the highest grade is ranked last, as a tie counts against the model.
        judged: The answers.
        ks: The k of each recall@k and precision@k.
    """
    names = [f"{name}@{k}" for name in ("recall", "precision") for k in ks]
    names += [f"ndcg@{NDCG_AT}", "map", "mrr"]
    bounds = [*np.flatnonzero(np.diff(judged.query, prepend=-1)).tolist(), len(ranks)]
    table = np.empty((len(names), len(bounds) - 1))
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        table[:, number] = _of_query(ranks[first:last], judged.grade[first:last], ks)
    means = {name: float(np.mean(row)) for name, row in zip(names, table, strict=True)}
    return {**means, "queries": table.shape[1]}


def _of_query(ranks: Ints, grades: Ints, ks: Sequence[int]) -> list[float]:
    order = np.lexsort((grades, ranks))
    ranks, grades, place = ranks[order], grades[order], np.arange(len(ranks))
    # No two answers have one rank: each is at least one before the next.
    ranks = place + np.minimum.accumulate((ranks - place)[::-1])[::-1]
    gains = np.where(ranks <= NDCG_AT, grades / np.log2(ranks + 1.0), 0.0)
    best = (np.sort(grades)[::-1] / np.log2(place + 2.0))[:NDCG_AT]
    found = [int(np.count_nonzero(ranks <= k)) for k in ks]
    return [
        *(count / len(ranks) for count in found),
        *(count / k for count, k in zip(found, ks, strict=True)),
        float(gains.sum() / best.sum()),
        float(np.mean((place + 1) / ranks)),
        1.0 / int(ranks[0]),
    ]
