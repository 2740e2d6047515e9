"""How far retrieval can get with the tokens of the held-out texts, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_recompute.app.data import Ceiling, ceiling
from paddle_recompute.app.data.tokenizer import TokenRows
from paddle_recompute.app.retrieval.evaluation import retrieval_metrics

UNK, CLS, SEP = 1, 2, 3


def rows(*texts: list[int]) -> TokenRows:
    ids = [[CLS, *text, SEP] for text in texts]
    return TokenRows(
        np.concatenate([np.array(one, np.int32) for one in ids]),
        np.cumsum([0, *map(len, ids)], dtype=np.int64),
        0,
        0,
    )


QUERIES = rows([7], [8], [UNK], [UNK], [9], [9], [10], [UNK, 7], [])
POOL = rows([20], [21], [22], [23], [24], [25], [25], [26])
TARGET = [0, 1, 2, 3, 4, 4, 5, 0, 7]


def test_what_is_counted() -> None:
    found = ceiling(QUERIES, POOL, TARGET, unknown=UNK)
    assert found == Ceiling(
        unknown_queries=2,
        equal_queries=2,  # the two [UNK]; those of token 9 look for the same answer
        equal_answers=1,  # of the query of token 10
        best_recall=7 / 9,
    )
    counts = {"unknown_queries": 2, "equal_queries": 2, "equal_answers": 1}
    assert found.to_dict() == {**counts, "recall@1_ceiling": 7 / 9}
    assert found.notes() == [
        "2 held-out queries have no token but [UNK]",
        "2 held-out queries have the tokens of a query with another answer",
        "1 answers have, after cutting, the tokens of another candidate",
        "no model can have a recall@1 above 0.7778 on these texts",
    ]


def test_the_best_model_reaches_it() -> None:
    """Each query at the answer that most of its kind look for; equal tokens, equal vectors."""
    vectors = np.eye(8)
    vectors[6] = vectors[5]
    best = vectors[[0, 1, 2, 2, 4, 4, 5, 0, 7]]
    metrics = retrieval_metrics(best, vectors, np.array(TARGET))
    assert metrics["recall@1"] == pytest.approx(
        ceiling(QUERIES, POOL, TARGET, unknown=UNK).best_recall
    )


def test_nothing_is_said_where_nothing_is_lost() -> None:
    found = ceiling(rows([7], [8]), rows([20], [21]), [1, 0], unknown=UNK)
    assert found == Ceiling(0, 0, 0, 1.0)
    assert found.notes() == []
