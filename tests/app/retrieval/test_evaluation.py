"""Ranks against brute force, in every tiling; encoding leaves the model as it was.

Metrics of graded answers, against their definitions and trec_eval (pytrec_eval, with
``make test-torch``).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tracemalloc
from contextlib import nullcontext
from typing import Any

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paddle_recompute.app.retrieval.evaluation import Judgements, encode_batches, retrieval_metrics
from paddle_recompute.errors import DataError

Array = NDArray[Any]


def unit_rows(shape: tuple[int, int], seed: int) -> Array:
    rows = np.random.default_rng(seed).normal(size=shape)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("tile", [7, 1000])
def test_ranks_of_float_vectors_are_those_of_brute_force(tile: int) -> None:
    query, pool = unit_rows((50, 37), 0), unit_rows((333, 37), 1)
    target = np.random.default_rng(2).integers(0, 333, 50)
    exact = expected(query, pool, [{place: 1} for place in target.tolist()])
    found = retrieval_metrics(query, pool, target, ks=KS, tile=tile)
    assert found == pytest.approx({**exact, "queries": 50, "pool_size": 333, "tied": 0}, abs=1e-12)


@pytest.mark.parametrize("tile", [5, 4096])
def test_equal_candidates_are_ties_wherever_they_stand(tile: int) -> None:
    """A matrix product may add up equal rows in another order, and so to another score."""
    different, copies, dim = 67, 11, 301
    once = unit_rows((different, dim), 3)
    pool = np.concatenate([once] * copies)[np.random.default_rng(4).permutation(different * copies)]
    query = once + 0.01 * unit_rows((different, dim), 5)
    places = (pool[None, :, :4] == once[:, None, :4]).all(axis=2)
    for choice in (0, copies - 1):  # the first or the last of the copies is the target
        target = np.array([np.flatnonzero(row)[choice] for row in places])
        found = retrieval_metrics(query, pool, target, ks=(copies - 1, copies), tile=tile)
        assert found[f"recall@{copies}"] == 1.0
        assert found[f"recall@{copies - 1}"] == 0.0
        assert found["tied"] == different


def test_rounding_of_long_vectors_does_not_decide_between_equal_scores() -> None:
    """The candidates score the same, but their sums go through numbers of 1e8."""
    random = np.random.default_rng(9)
    query = np.ones((1, 96), np.float32)
    pool = np.zeros((200, 96), np.float32)
    pool[:, :32] = unit_rows((1, 32), 10)
    large = random.normal(scale=1e8, size=(199, 32)).astype(np.float32)
    pool[1:, 32:] = np.concatenate([large, -large], axis=1)[:, random.permutation(64)]
    found = retrieval_metrics(query, pool, np.array([0]), ks=(199, 200))
    assert (found["recall@199"], found["recall@200"]) == (0.0, 1.0)


def test_scores_are_never_all_in_memory() -> None:
    query, pool = unit_rows((3000, 8), 7), unit_rows((4000, 8), 8)
    tracemalloc.start()
    retrieval_metrics(query, pool, np.arange(3000), tile=128)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # 3000 * 4000 booleans alone would be 12 MB; four blocks [128, 128] of float64 are 0.5 MB.
    assert peak < 2e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # NaN compares as smaller than everything, so it would look like a perfect model.
        (
            {"query": np.array([[1, 1], [np.nan, 1], [1, 1]])},
            "1 vectors of the queries .* row 1",
        ),
        ({"pool": np.array([[1, 1], [1, np.inf]] * 2)}, "2 vectors of the pool are not finite"),
        ({"target": Judgements.of([{3: 1}] * 3), "excluded": np.array([-1, 3, -1])}, "is excluded"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"query": np.ones((3, 2)), "pool": np.ones((4, 2)), "target": np.arange(3)}
    with pytest.raises(DataError, match=message):
        retrieval_metrics(**{**arguments, **change})


class Letters:
    """One id for each letter; remembers what it was given."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def encode(self, texts: list[str], max_tokens: int, /) -> NDArray[np.int64]:
        self.batches.append(texts)
        cut = [text[:max_tokens] for text in texts]
        ids = np.zeros((len(cut), max(map(len, cut))), np.int64)
        for row, text in zip(ids, cut, strict=True):
            row[: len(text)] = [ord(letter) - ord("a") + 1 for letter in text]
        return ids


class SumOfLetters(paddle.nn.Layer):
    """Sums the vectors of the letters; in training mode dropout spoils the result."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(0)
        self.embedding = paddle.nn.Embedding(27, 6, padding_idx=0)
        self.dropout = paddle.nn.Dropout(0.5)
        self.frozen = paddle.nn.Dropout(0.5)
        self.recorded_gradient: list[bool] = []

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        vectors = self.frozen(self.dropout(self.embedding(ids))).sum(axis=1)
        self.recorded_gradient.append(not vectors.stop_gradient)
        return vectors


TEXTS = ["ab", "abcdef", "z", "hello", "xyz", "abcdefghij", "q"]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_vectors_come_in_the_order_of_the_texts(batch_size: int) -> None:
    """Those of a batch have about the same length."""
    model, tokenizer, done = SumOfLetters(), Letters(), list[int]()
    options: Any = {"max_tokens": 8, "batch_size": batch_size, "progress": done.append}
    found = encode_batches(model, tokenizer, TEXTS, **options)
    if batch_size == 3:
        lengths = [[len(text) for text in batch] for batch in tokenizer.batches]
        assert lengths == [[10, 6, 5], [3, 2, 1], [1]] and done == [3, 3, 1]
    weight = model.embedding.weight.numpy()
    expected = np.stack(
        [sum(weight[ord(letter) - ord("a") + 1] for letter in text[:8]) for text in TEXTS]
    )
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_encoding_leaves_modes_gradients_and_random_numbers_alone(fails: bool) -> None:
    model = SumOfLetters()
    model.train()
    model.frozen.eval()
    paddle.seed(11)
    expected = paddle.rand([3]).numpy()
    paddle.seed(11)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        encode_batches(
            model,
            Letters(),
            TEXTS,
            max_tokens=8,
            batch_size=3,
            progress=lambda done: done // (not fails),
        )
    np.testing.assert_array_equal(paddle.rand([3]).numpy(), expected)
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)
    assert not any(model.recorded_gradient)
    assert model.embedding.weight.grad is None
    assert paddle.is_grad_enabled()


def test_vector_of_zeros_remains_one_and_no_texts_are_refused() -> None:
    model = SumOfLetters()
    model.embedding.weight.set_value(paddle.zeros([27, 6]))
    found = encode_batches(model, Letters(), TEXTS, max_tokens=8, batch_size=3)
    np.testing.assert_array_equal(found, np.zeros((7, 6), np.float32))
    with pytest.raises(DataError, match=r"received 0 texts and batch_size=3; both must be"):
        encode_batches(model, Letters(), [], max_tokens=8, batch_size=3)


# -------------------------------------------------------------------- the metrics of graded answers


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
        places += [-2, -3][: random.integers(3)]  # not in the pool, never found
        answers.append({place: int(random.integers(1, 4)) for place in places})
        others = [-1, *set(range(rows)).difference(places)]
        excluded.append(others[random.integers(len(others))])
    return query, pool, answers, np.array(excluded), draw(st.integers(1, 35))


def has_ties(scores: Any, grades: dict[int, int], excluded: int) -> bool:
    return any(
        np.count_nonzero(np.delete(scores, [excluded][: int(excluded >= 0)]) == scores[place]) > 1
        for place in grades
        if place >= 0
    )


@settings(max_examples=300, deadline=None)
@given(judged(), st.booleans())
def test_graded_metrics_are_their_definitions(
    case: tuple[Any, Any, list[dict[int, int]], Any, int], excludes: bool
) -> None:
    query, pool, answers, excluded, tile = case
    without = excluded if excludes else None
    without_or_none = excluded if excludes else [-1] * len(query)
    found = retrieval_metrics(
        query, pool, Judgements.of(answers), ks=KS, tile=tile, excluded=without
    )
    assert (found.pop("queries"), found.pop("pool_size")) == (len(query), len(pool))
    assert found.pop("tied") == sum(map(has_ties, query @ pool.T, answers, without_or_none))
    assert found == pytest.approx(expected(query, pool, answers, without), abs=1e-12)


# ---------------------------------------------------------------------------------------- trec_eval


TORCH_PYTHON = os.environ.get("TORCH_PYTHON", "")
CUTS = (1, 5, 10)
NAMES = {
    **{f"recall@{k}": f"recall_{k}" for k in CUTS},
    **{f"precision@{k}": f"P_{k}" for k in CUTS},
    **{"ndcg@10": "ndcg_cut_10", "map": "map", "mrr": "recip_rank"},
}
MEASURES = {"recall.1,5,10", "P.1,5,10", "ndcg_cut.10", "map", "recip_rank"}
SCRIPT = """
import json, sys, pytrec_eval
answers, scores, measures = json.load(sys.stdin)
print(json.dumps(pytrec_eval.RelevanceEvaluator(answers, set(measures)).evaluate(scores)))
"""


def trec_eval(answers: list[dict[int, int]], scores: np.ndarray) -> dict[str, dict[str, float]]:
    graded = {f"q{n}": {f"d{row}": g for row, g in some.items()} for n, some in enumerate(answers)}
    scored = {
        f"q{n}": {f"d{i}": float(s) for i, s in enumerate(row)} for n, row in enumerate(scores)
    }
    run = subprocess.run(
        [TORCH_PYTHON, "-c", SCRIPT],
        input=json.dumps([graded, scored, sorted(MEASURES)]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, dict[str, float]] = json.loads(run.stdout)
    return found


@pytest.mark.skipif(not TORCH_PYTHON, reason="needs pytrec_eval (make test-torch)")
def test_the_metrics_are_those_of_trec_eval() -> None:
    """Without equal scores, which the two order differently: ours puts the answers last."""
    random = np.random.default_rng(0)
    query, pool = random.normal(size=(200, 8)), random.normal(size=(300, 8))
    answers = []
    for number in range(len(query)):
        # Near the top more often than not, so that no metric is nearly 0 everywhere.
        order = np.argsort(-(pool @ query[number]))
        ranks = (random.geometric(0.05, size=random.integers(1, 30)) - 1) % len(pool)
        places = order[np.unique(ranks)]
        answers.append({int(place): int(random.integers(1, 5)) for place in places})
        if number % 3 == 0:
            answers[-1] |= {-2: 4, -5: 1}  # not in the pool
    theirs = trec_eval(answers, query @ pool.T)
    found = retrieval_metrics(query, pool, Judgements.of(answers), ks=CUTS)
    for name, measure in NAMES.items():
        mean = np.mean([one[measure] for one in theirs.values()])
        assert 0.01 < mean < 0.99, name
        assert found[name] == pytest.approx(mean, abs=1e-9), name
