"""The nearest texts, against brute force; pools that cannot be searched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paddle_recompute.app.retrieval import index as search_module
from paddle_recompute.app.retrieval.encoding import encode_file
from paddle_recompute.app.retrieval.evaluation import encode_batches
from paddle_recompute.app.retrieval.index import Index
from paddle_recompute.app.retrieval.nearest import top_of_tiles
from paddle_recompute.app.retrieval.trained import load_encoder
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


@pytest.mark.parametrize("tile", [7, 1000])
def test_hits_are_those_of_brute_force(
    tile: int, pools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_module, "_TILE", tile)
    encoder = load_encoder(pools / "run")
    queries = ["big cat", " stone river "]
    options: Any = {"max_tokens": 10, "batch_size": 256}
    vectors = encode_batches(
        encoder.model, encoder.tokenizer, [*map(str.strip, queries)], **options
    )
    options["max_tokens"] = 12
    pool = encode_batches(encoder.model, encoder.tokenizer, texts(COUNT), **options)
    scores = vectors.astype(np.float64) @ pool.astype(np.float64).T
    found = Index.load(pools / "npy" / "pool.npy").search(queries, top_k=5)
    for hits, row in zip(found, scores, strict=True):
        best = np.argsort(-row, kind="stable")[:5]
        assert [hit.row for hit in hits] == best.tolist()
        assert [hit.text for hit in hits] == [texts(COUNT)[place] for place in best]
        assert [hit.rank for hit in hits] == [1, 2, 3, 4, 5]
        assert [hit.score for hit in hits] == pytest.approx(row[best].tolist(), abs=1e-6)
    assert found[0][0].to_dict().keys() == {"rank", "score", "row", "text"}


def test_what_the_model_does_not_see_of_a_query_is_told(pools: Path) -> None:
    told: list[str] = []
    queries = ["big cat", "big cat " * 9, "big 猫"]
    found = Index.load(pools / "npy").search(queries, top_k=1, tell=told.append)
    assert found == Index.load(pools / "npy").search(queries, top_k=1)
    cut, unknown = told
    assert cut.startswith("'big cat big") and cut.endswith(
        "is cut after 10 tokens, the limit for queries in training"
    )
    assert unknown == "'big 猫' has words outside the vocabulary; each of them is read as [UNK]"


def test_small_pool_gives_all_of_it(pools: Path) -> None:
    (hits,) = Index.load(pools / "npy").search(["cat"], top_k=1000)
    assert sorted(hit.row for hit in hits) == list(range(COUNT))


def test_pool_of_another_model_is_refused(pools: Path, tmp_path: Path) -> None:
    make_run(tmp_path, seed=1)
    with pytest.raises(DataError, match="was encoded by another model than that in"):
        Index.load(pools / "npy").search(["cat"], encoder=load_encoder(tmp_path / "run"))


@pytest.mark.parametrize(("queries", "top_k"), [([], 1), (["cat", " "], 1)])
def test_nothing_to_search_for_is_told(queries: list[str], top_k: int, pools: Path) -> None:
    with pytest.raises(DataError, match=r"received \d queries; allowed are one or more, none of"):
        Index.load(pools / "npy").search(queries, top_k=top_k)


def copy_of(pools: Path, folder: Path) -> Path:
    for path in (pools / "npy").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder / "pool.npy"


def test_pools_that_are_not_there_are_told(pools: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pool.npy: there is no such file; `paddle-recompute enc"):
        Index.load(tmp_path / "pool.npy")
    with pytest.raises(DataError, match="holds none of encoded texts; name one file"):
        Index.load(tmp_path)
    file = copy_of(pools, tmp_path)
    for name in ("more.npy", "more.npy.json"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"holds more.npy, pool.npy of encoded texts; name one"):
        Index.load(tmp_path)
    (tmp_path / "pool.jsonl").touch()
    with pytest.raises(DataError, match=r"pool.jsonl: is no .npy file; encode the texts into one"):
        Index.load(tmp_path / "pool.jsonl")
    about = tmp_path / "pool.npy.json"
    record = json.loads(about.read_text())
    about.write_text(json.dumps({**record, "model": str(tmp_path / "gone" / "step-3")}))
    with pytest.raises(CheckpointError, match="gone: contains no trained model"):
        Index.load(file).search(["cat"])
    for missing in record:
        about.write_text(json.dumps({key: record[key] for key in record if key != missing}))
        if missing in ("texts", "texts_sha256", "done", "dim", "model", "fingerprint"):
            with pytest.raises(
                DataError, match=rf"pool.npy.json: is damaged \(KeyError.'{missing}"
            ):
                Index.load(file)
        else:
            Index.load(file)
    about.unlink()
    with pytest.raises(DataError, match=r"cannot be read .* beside pool.npy"):
        Index.load(file)


def one_letter(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-4]), "cannot be read as vectors"),
        (lambda file: np.save(file, np.ones((3, 16), np.float32)), r"the shape \(3, 16\)"),
        (
            lambda file: file.with_name("pool.npy.txt").write_text("cat\n"),
            "txt: has 1 texts; expected 40",
        ),
        (lambda file: file.with_name("pool.npy.txt").write_bytes(b"\xff\n"), "txt: cannot be read"),
        (lambda file: one_letter(file.with_name("pool.npy.txt")), "txt: has other texts than were"),
    ],
)
def test_damaged_pools_are_told(damage: Any, message: str, pools: Path, tmp_path: Path) -> None:
    file = copy_of(pools, tmp_path)
    damage(file)
    with pytest.raises(DataError, match=message):
        Index.load(file).search(["cat"], top_k=COUNT)
