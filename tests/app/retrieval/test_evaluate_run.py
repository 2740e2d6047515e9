"""The command that evaluates a run: the metrics of its vectors, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from paddle_recompute.app import cli
from paddle_recompute.app.data import read_judged
from paddle_recompute.app.retrieval import encode_texts, load_encoder
from tests.app.data.test_judged import written
from tests.app.retrieval.test_metrics import expected
from tests.app.trainer.trained_run import make_run, texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``run``, and ``beir`` of 40 documents and 3 queries; one has the id of a document."""
    made = tmp_path_factory.mktemp("evaluated")
    make_run(made)
    documents = [json.dumps({"_id": f"d{n}", "text": text}) for n, text in enumerate(texts(40))]
    queries = [
        json.dumps({"_id": name, "text": text})
        for name, text in (("d7", "big cat"), ("b", "stone river"), ("c", "tree " * 20))
    ]
    judged = ["d7\td8\t2", "d7\td9\t1", "b\td20\t1", "c\td30\t3", "c\td31\t1", "c\td32\t2"]
    files = {"corpus": documents, "queries": queries, "test": judged}
    (made / "beir").mkdir()
    written(made / "beir", **{name: "\n".join(lines) for name, lines in files.items()})
    return made


def run(folder: Path, *arguments: str) -> Any:
    return CliRunner().invoke(
        cli.main,
        ["evaluate", "--model", str(folder / "run"), "--data", str(folder / "beir"), *arguments],
    )


@pytest.mark.parametrize("excludes", [False, True])
def test_record(folder: Path, excludes: bool) -> None:
    result = run(folder, "--json", *(["--exclude-same-id"] if excludes else []))
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    encoder, judged = load_encoder(folder / "run"), read_judged(folder / "beir")
    query = encode_texts(encoder, judged.queries, side="query")
    pool = encode_texts(encoder, judged.pool)
    without = np.array([7, -1, -1]) if excludes else None
    assert judged.same_id == [7, -1, -1]
    wanted = expected(query, pool, judged.answers, without)
    assert record["metrics"]["map"] == pytest.approx(wanted["map"], abs=1e-12)
    assert record["metrics"]["ndcg@10"] == pytest.approx(wanted["ndcg@10"], abs=1e-12)
    assert {"recall@100", "precision@1", "mrr"} < set(record["metrics"])
    assert (record["queries"], record["pool_size"], record["judgements"]) == (3, 40, 6)
    assert record["notes"] == ["1 queries are cut after 10 tokens"]


def test_table_and_refusal(folder: Path, tmp_path: Path) -> None:
    shown = run(folder).stdout
    assert shown.startswith("3 queries, 40 candidates for each\n  1 queries are cut after 10 tok")
    assert "\nmap           0." in shown
    result = run(folder, "--split", "dev")
    assert result.exit_code == 2
    assert "dev.tsv: there is no such file" in result.stderr
