"""The nearest texts, against brute force; pools that cannot be searched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paddle_recompute.app.retrieval import index as search_module
from paddle_recompute.app.retrieval.encoding import encode_file
from paddle_recompute.app.retrieval.index import Index, top_of_tiles
from paddle_recompute.app.retrieval.trained import encode_texts, load_encoder
from paddle_recompute.errors import CheckpointError, DataError
from tests.app.trainer.trained_run import make_run, texts

COUNT = 40


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``run`` and, in a folder of its own, ``npy/pool.npy``."""
    folder = tmp_path_factory.mktemp("pools")
    make_run(folder, of_words=True)
    (folder / "texts.txt").write_text("\n".join(texts(COUNT)))
    encoder = load_encoder(folder / "run")
    encode_file(encoder, folder / "texts.txt", folder / "npy" / "pool.npy")
    return folder


@st.composite
def pools_in_tiles(draw: st.DrawFn) -> tuple[Any, Any, int, int]:
    """Vectors of small integers: many scores are equal."""
    queries, rows, dim = draw(st.integers(1, 4)), draw(st.integers(1, 20)), draw(st.integers(1, 3))
    numbers = st.integers(-2, 2)
    query = draw(arrays.arrays(np.float32, (queries, dim), elements=numbers))
    pool = draw(arrays.arrays(np.float32, (rows, dim), elements=numbers))
    return query, pool, draw(st.integers(1, 21)), draw(st.integers(1, 25))


@settings(max_examples=200, deadline=None)
@given(pools_in_tiles())
def test_top_of_tiles_is_the_head_of_the_sorted_whole(case: tuple[Any, Any, int, int]) -> None:
    query, pool, tile, top_k = case
    tiles = [pool[first : first + tile] for first in range(0, len(pool), tile)]
    scores, rows = top_of_tiles(query, tiles, top_k)
    every = query @ pool.T
    expected = np.argsort(-every, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(scores, np.take_along_axis(every, expected, 1))


def test_hits_are_those_of_brute_force(pools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And sentences tell what the model does not see of a query."""
    monkeypatch.setattr(search_module, "_TILE", 7)
    encoder, told = load_encoder(pools / "run"), list[str]()
    queries = ["big cat", " stone river ", "big cat " * 9, "big 猫"]
    query = encode_texts(encoder, [*map(str.strip, queries)], side="query")
    pool = encode_texts(encoder, texts(COUNT))
    scores = query.astype(np.float64) @ pool.astype(np.float64).T
    found = Index.load(pools / "npy").search(queries, top_k=1000, tell=told.append)
    for hits, row in zip(found, scores, strict=True):
        best = np.argsort(-row, kind="stable")
        assert [hit.row for hit in hits] == best.tolist()
        assert [hit.text for hit in hits] == [texts(COUNT)[place] for place in best]
        assert [hit.rank for hit in hits] == [*range(1, COUNT + 1)]
        assert [hit.score for hit in hits] == pytest.approx(row[best].tolist(), abs=1e-6)
    assert found[0][0].to_dict().keys() == {"rank", "score", "row", "text"}
    cut, unknown = told
    assert cut.startswith("'big cat big") and cut.endswith(
        "is cut after 10 tokens, the limit for queries in training"
    )
    assert unknown == "'big 猫' has words outside the vocabulary; each of them is read as [UNK]"


@pytest.mark.parametrize("queries", [[], ["cat", " "]])
def test_nothing_to_search_for_is_told(queries: list[str], pools: Path) -> None:
    with pytest.raises(DataError, match=r"received \d queries; allowed are one or more, none of"):
        Index.load(pools / "npy").search(queries)


def copy_of(pools: Path, folder: Path) -> Path:
    shutil.copytree(pools / "npy", folder, dirs_exist_ok=True)
    return folder / "pool.npy"


def test_pools_that_are_not_there_are_told(pools: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pool.npy: there is no such file; `paddle-recompute enc"):
        Index.load(tmp_path / "pool.npy")
    with pytest.raises(DataError, match="holds none of encoded texts; name one file"):
        Index.load(tmp_path)
    file = copy_of(pools, tmp_path)
    for name in ("more.npy", "more.npy.json", "pool.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"holds more.npy, pool.npy of encoded texts; name one"):
        Index.load(tmp_path)
    with pytest.raises(DataError, match=r"pool.jsonl: is no .npy file; encode the texts into one"):
        Index.load(tmp_path / "pool.jsonl")
    about = tmp_path / "pool.npy.json"
    record = json.loads(about.read_text())
    about.write_text(json.dumps({**record, "model": str(tmp_path / "gone" / "step-3")}))
    with pytest.raises(CheckpointError, match="gone: contains no trained model"):
        Index.load(file).search(["cat"])
    for missing in ("texts", "texts_sha256", "done", "dim", "model", "fingerprint"):
        about.write_text(json.dumps({key: record[key] for key in record if key != missing}))
        with pytest.raises(DataError, match=rf"json: is damaged \(KeyError.'{missing}"):
            Index.load(file)
    about.unlink()
    with pytest.raises(DataError, match=r"cannot be read .* beside pool.npy"):
        Index.load(file)


def one_letter(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("pool.npy", lambda f: f.write_bytes(f.read_bytes()[:-4]), "cannot be read as vectors"),
        ("pool.npy", lambda f: f.write_bytes(b""), "cannot be read as vectors"),
        ("pool.npy", lambda f: np.save(f, np.ones((3, 16), np.float32)), r"the shape \(3, 16\)"),
        ("pool.npy.txt", lambda f: f.write_text("cat\n"), "txt: has 1 texts; expected 40"),
        ("pool.npy.txt", lambda f: f.write_bytes(b"\xff\n"), "txt: cannot be read"),
        ("pool.npy.txt", one_letter, "txt: has other texts than were"),
    ],
)
def test_damaged_pools_are_told(
    name: str, damage: Any, message: str, pools: Path, tmp_path: Path
) -> None:
    file = copy_of(pools, tmp_path)
    damage(tmp_path / name)
    with pytest.raises(DataError, match=message):
        Index.load(file).search(["cat"], top_k=COUNT)
