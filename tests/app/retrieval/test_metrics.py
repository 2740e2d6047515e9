"""Metrics of graded answers, against their definitions written out query by query."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_recompute.app.retrieval.evaluation import Judgements, retrieval_metrics
from paddle_recompute.errors import DataError

KS = (1, 3, 10)


def plainly(ranking: list[int], grades: dict[int, int]) -> dict[str, float]:
    """trec_eval's definitions for one query, from its ranking of all candidates."""
    relevant = [place in grades for place in ranking]
    found = {}
    for k in KS:
        found[f"recall@{k}"] = sum(relevant[:k]) / len(grades)
        found[f"precision@{k}"] = sum(relevant[:k]) / k

    def dcg(gains: list[int]) -> float:
        return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains[:10], start=1))

    ideal = dcg(sorted(grades.values(), reverse=True))
    found["ndcg@10"] = dcg([grades.get(place, 0) for place in ranking]) / ideal
    hits = 0
    precisions = []
    for rank, is_relevant in enumerate(relevant, start=1):
        hits += is_relevant
        if is_relevant:
            precisions.append(hits / rank)
    found["map"] = sum(precisions) / len(grades)
    found["mrr"] = 1 / (1 + relevant.index(True))
    return found


def expected(
    query: Any, pool: Any, answers: list[dict[int, int]], excluded: Any = None
) -> dict[str, float]:
    each = []
    for number, grades in enumerate(answers):
        scores = pool.astype(np.float64) @ query[number].astype(np.float64)
        # Of equal scores: the answers last, of those the better ones last.
        order = sorted(range(len(pool)), key=lambda row: (-scores[row], grades.get(row, 0)))
        if excluded is not None:
            order = [row for row in order if row != excluded[number]]
        each.append(plainly(order, grades))
    return {name: sum(one[name] for one in each) / len(each) for name in each[0]}


@st.composite
def judged(draw: st.DrawFn) -> tuple[Any, Any, list[dict[int, int]], Any, int]:
    """Vectors of small integers: many scores are equal."""
    queries, rows, dim = draw(st.integers(1, 5)), draw(st.integers(2, 30)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    query = random.integers(-2, 3, (queries, dim)).astype(np.float32)
    pool = random.integers(-2, 3, (rows, dim)).astype(np.float32)
    answers, excluded = [], []
    for _ in range(queries):
        places = random.permutation(rows)[: random.integers(1, rows)].tolist()
        answers.append({place: int(random.integers(1, 4)) for place in places})
        others = [-1, *set(range(rows)).difference(places)]
        excluded.append(others[random.integers(len(others))])
    return query, pool, answers, np.array(excluded), draw(st.integers(1, 35))


@settings(max_examples=300, deadline=None)
@given(judged(), st.booleans())
def test_graded_metrics_are_their_definitions(
    case: tuple[Any, Any, list[dict[int, int]], Any, int], excludes: bool
) -> None:
    query, pool, answers, excluded, tile = case
    without = excluded if excludes else None
    found = retrieval_metrics(
        query, pool, Judgements.of(answers), ks=KS, tile=tile, excluded=without
    )
    assert (found.pop("queries"), found.pop("pool_size")) == (len(query), len(pool))
    assert found == pytest.approx(expected(query, pool, answers, without), abs=1e-12)


def test_a_target_is_one_answer_of_grade_1() -> None:
    random = np.random.default_rng(0)
    query, pool = random.normal(size=(9, 4)), random.normal(size=(40, 4))
    target = random.integers(0, 40, 9)
    answers = Judgements.of([{place: 1} for place in target.tolist()])
    assert retrieval_metrics(query, pool, target) == retrieval_metrics(query, pool, answers)


def test_answers_that_do_not_fit_are_refused() -> None:
    query, pool = np.ones((2, 3)), np.ones((4, 3))
    with pytest.raises(DataError, match="received 2 queries, and answers to 1; each of at least"):
        retrieval_metrics(query, pool, Judgements.of([{0: 1}, {}]))
    with pytest.raises(DataError, match="from 0 to 4; allowed are the rows of the pool, 0 to 3"):
        retrieval_metrics(query, pool, Judgements.of([{0: 1}, {4: 1}]))
    with pytest.raises(DataError, match="an answer is excluded from the candidates"):
        excluded = np.array([-1, 3])
        retrieval_metrics(query, pool, Judgements.of([{3: 1}, {3: 1}]), excluded=excluded)
