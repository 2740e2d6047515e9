"""The metrics are those of trec_eval itself (pytrec_eval, with `make test-torch`)."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest

from paddle_recompute.app.retrieval.evaluation import Judgements, retrieval_metrics

TORCH_PYTHON = os.environ.get("TORCH_PYTHON", "")
KS = (1, 5, 10)
NAMES = {
    **{f"recall@{k}": f"recall_{k}" for k in KS},
    **{f"precision@{k}": f"P_{k}" for k in KS},
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
    theirs = trec_eval(answers, query @ pool.T)
    found = retrieval_metrics(query, pool, Judgements.of(answers), ks=KS)
    for name, measure in NAMES.items():
        mean = np.mean([one[measure] for one in theirs.values()])
        assert 0.01 < mean < 0.99, name
        assert found[name] == pytest.approx(mean, abs=1e-9), name
