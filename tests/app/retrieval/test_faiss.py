"""`mine --faiss`: candidates from an index of faiss, with exact scores."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from paddle_recompute.app import cli
from paddle_recompute.app.retrieval import Index, MiningOptions, load_encoder, mine
from paddle_recompute.app.retrieval import mining as module
from paddle_recompute.app.retrieval.approximate import Approximate
from paddle_recompute.errors import DataError, DependencyError
from tests.app.retrieval import test_mining
from tests.app.trainer.trained_run import make_run, texts


@pytest.fixture
def needs_faiss() -> Iterator[None]:
    faiss = pytest.importorskip("faiss", reason="faiss is not installed: pip install faiss-cpu")
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # HNSW of several threads differs from run to run
    yield
    faiss.omp_set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mined")
    make_run(folder)
    (folder / "pool.txt").write_text("\n".join(texts(60)) + "\n", encoding="utf-8")
    some = texts(60)
    lines = [f"{some[i % 7]}\t{some[20 + i]}" for i in range(9)]
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 4)


def mined(made: Path, output: Path, **options: Any) -> dict[str, Any]:
    encoder = load_encoder(made / "run")
    return mine(encoder, made / "pairs.tsv", made / "pool.txt", output, **options)


@pytest.mark.usefixtures("needs_faiss")
def test_a_flat_index_mines_what_exact_search_mines(made: Path, tmp_path: Path) -> None:
    options = MiningOptions(margin=0.01)
    exact = mined(made, tmp_path / "exact.jsonl", options=options)
    record = mined(made, tmp_path / "flat.jsonl", options=options, faiss="Flat")
    assert (tmp_path / "flat.jsonl").read_bytes() == (tmp_path / "exact.jsonl").read_bytes()
    assert (record["faiss"], record["recall"]) == ("Flat", 1.0)
    assert "recall" not in exact
    counts = ("lines_with", "scores_of_negatives", "scores_of_positives")
    assert [record[name] for name in counts] == [exact[name] for name in counts]


@pytest.mark.usefixtures("needs_faiss")
@pytest.mark.parametrize("factory", ["IVF4,Flat", "IVF4,Flat;nprobe=4", "HNSW4;efSearch=3", "SQ4"])
def test_what_is_found_has_exact_scores_and_a_recall(factory: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    vectors = random.standard_normal((9000, 8)).astype(np.float32)
    query = random.standard_normal((5, 8)).astype(np.float32)
    index = Index(vectors, [f"text {number}" for number in range(9000)])
    index.save(tmp_path / "pool.npy")
    on_disk = Index.load(tmp_path / "pool.npy")
    seen: list[tuple[int, int]] = []
    found = Approximate(on_disk, factory, lambda *at: seen.append(at))
    assert seen == [(8192, 9000), (9000, 9000)]
    scores, rows = found.top(query, 5000)
    for number in range(5):
        inside = rows[number] >= 0
        expected = (query[number].astype(np.float64) @ vectors[rows[number, inside]].T).astype("f4")
        np.testing.assert_allclose(scores[number, inside], expected, rtol=1e-6)
        assert np.all(np.diff(scores[number, inside]) <= 0)
        assert np.all(np.isinf(scores[number, ~inside]))
    if factory == "IVF4,Flat":
        assert (rows == -1).any()  # a cluster has fewer
    exact = np.argsort(-(query @ vectors.T), axis=1)[:, :100]
    _, rows = found.top(query, 100)
    share = np.mean([len({*a} & {*b}) / 100 for a, b in zip(exact, rows, strict=True)])
    assert found.recall(query, 100) == pytest.approx(share)
    assert share == 1 if "nprobe=4" in factory else share < 1


@pytest.mark.usefixtures("needs_faiss")
@pytest.mark.parametrize("kill_at", [("index", 60), ("mine", 0), ("mine", 4)])
def test_a_killed_run_begins_anew(made: Path, tmp_path: Path, kill_at: tuple[str, int]) -> None:
    test_mining.test_a_killed_run_continues_to_the_same_bytes(made, tmp_path, kill_at, "HNSW4")


@pytest.mark.usefixtures("needs_faiss")
def test_another_index_is_refused(made: Path, tmp_path: Path) -> None:
    mined(made, tmp_path / "out.jsonl", faiss="HNSW4")
    for other in ("Flat", None):
        with pytest.raises(DataError, match=r"exists, and was made with faiss=HNSW4; remove"):
            mined(made, tmp_path / "out.jsonl", faiss=other)


@pytest.mark.usefixtures("needs_faiss")
@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("Nonsense", "could not parse index string Nonsense"),
        ("IVF4096,Flat", "should be at least as large as number of clusters"),
        ("Flat;nprobe=3", "could not set parameter nprobe"),
        ("IVF4,Flat;nprobe=0", "cur_nprobe > 0"),
    ],
)
def test_what_faiss_refuses_is_told(made: Path, tmp_path: Path, factory: str, reason: str) -> None:
    with pytest.raises(DataError, match=rf"--faiss {factory}: refused by faiss \(.*{reason}"):
        mined(made, tmp_path / "out.jsonl", faiss=factory)


def test_without_faiss(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(DependencyError, match=r"is not installed; pip install faiss-cpu \(or 'pad"):
        mined(made, tmp_path / "out.jsonl", faiss="Flat")
    assert not [*tmp_path.iterdir()]  # nothing is encoded


@pytest.mark.usefixtures("needs_faiss")
def test_command(made: Path, tmp_path: Path) -> None:
    arguments = ["mine", "--model", str(made / "run"), "--pairs", str(made / "pairs.tsv")]
    arguments += ["--pool", str(made / "pool.txt"), "--output", str(tmp_path / "mined.jsonl")]
    result = CliRunner().invoke(cli.main, [*arguments, "--faiss", "Flat"])
    assert result.exit_code == 0, result.output
    shown = result.stdout.splitlines()
    assert "  faiss Flat: finds 1.0000 of what exact search finds" in shown
    assert json.loads(shown[-1])["recall"] == 1.0
