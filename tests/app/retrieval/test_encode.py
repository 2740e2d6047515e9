"""Text files to vectors: those of `encode_texts`, in any number of sittings.

And the nearest texts, against brute force; pools that cannot be searched.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from paddle_recompute.app.retrieval import encoding as encode_module
from paddle_recompute.app.retrieval import index as search_module
from paddle_recompute.app.retrieval.encoding import encode_file
from paddle_recompute.app.retrieval.evaluation import encode_batches
from paddle_recompute.app.retrieval.index import Index, top_of_tiles
from paddle_recompute.app.retrieval.trained import TrainedEncoder, encode_texts, load_encoder
from paddle_recompute.checkpoint.manifest import write_manifest
from paddle_recompute.errors import CheckpointError, DataError, OutputError
from tests.app.trainer.trained_run import make_run, texts

COUNT, BATCH, LOT = 23, 2, 6


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    make_run(folder, of_words=True)
    return folder / "run"


@pytest.fixture(scope="module")
def encoder(run: Path) -> TrainedEncoder:
    return load_encoder(run)


@pytest.fixture(autouse=True)
def small_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "_BATCHES_PER_BLOCK", LOT // BATCH)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(texts(COUNT)) + "\n", encoding="utf-8")
    return path


def expected(encoder: TrainedEncoder) -> np.ndarray[Any, Any]:
    model, tokenizer = encoder.model, encoder.tokenizer
    lots = [texts(COUNT)[first : first + LOT] for first in range(0, COUNT, LOT)]
    return np.concatenate(
        [encode_batches(model, tokenizer, lot, max_tokens=12, batch_size=BATCH) for lot in lots]
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def begin(*arguments: Any, **options: Any) -> None:
    """`encode_file`, until the first lot is done."""

    def stop(done: int, total: int) -> None:
        if done == LOT:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_file(*arguments, **options, progress=stop)


@contextmanager
def held(output: Path) -> Iterator[None]:
    """As another process that writes it."""
    output.parent.mkdir()
    with output.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        yield


def test_vectors_are_those_of_the_texts_in_their_order(
    encoder: TrainedEncoder, text_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "pool.npy"
    seen: list[tuple[int, int]] = []

    def change(*done: int) -> None:
        """The texts change meanwhile, and are not read again."""
        seen.append(done)
        text_file.write_text("other\n")

    with pytest.raises(DataError, match="another process is writing it; wait until"), held(output):
        encode_file(encoder, text_file, output, batch_size=BATCH)
    record = encode_file(encoder, text_file, output, batch_size=BATCH, progress=change)
    assert seen == [(done, COUNT) for done in (0, 6, 12, 18, 23)]
    vectors = np.load(output)
    lines = (tmp_path / "out" / "pool.npy.txt").read_text(encoding="utf-8").splitlines()
    assert lines == texts(COUNT)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, expected(encoder))
    about = json.loads((tmp_path / "out" / "pool.npy.json").read_text())
    assert about.items() <= record.items()
    assert (about["texts"], about["dim"], about["step"], about["cut"]) == (COUNT, 16, 3, 0)
    assert record["resumed_at"] == 0
    assert sorted(files_of(tmp_path / "out")) == ["pool.npy", "pool.npy.json", "pool.npy.txt"]


def test_death_at_any_moment_costs_no_byte(
    encoder: TrainedEncoder, text_file: Path, tmp_path: Path
) -> None:
    """Whatever reached the disk when it died: the next call, or the one after, finishes."""

    class DeathError(BaseException):
        pass

    text_file.write_text("\n".join(texts(LOT + 1)), encoding="utf-8")
    whole = tmp_path / "whole"
    encode_file(encoder, text_file, whole / "pool.npy", batch_size=BATCH)
    deaths = 0
    for last_breath in range(1, 100):
        with pytest.MonkeyPatch.context() as patch:
            left = [last_breath]

            def dying(act: Any, left: list[int] = left) -> Any:
                def mortal(*arguments: Any, **options: Any) -> Any:
                    left[0] -= 1
                    if left[0] == 0:
                        raise DeathError
                    return act(*arguments, **options)

                return mortal

            patch.setattr(os, "fsync", dying(os.fsync))
            patch.setattr(Path, "replace", dying(Path.replace))
            patch.setattr(encode_module, "_header", dying(encode_module._header))
            parts = tmp_path / f"parts-{last_breath}"
            try:
                encode_file(encoder, text_file, parts / "pool.npy", batch_size=BATCH)
            except DeathError:
                deaths += 1
            else:
                break
        encode_file(encoder, text_file, parts / "pool.npy", batch_size=BATCH)
        assert files_of(parts) == files_of(whole)
    assert deaths >= 6  # two lots, each with its record


def test_files_of_others_are_not_written_over(
    encoder: TrainedEncoder, text_file: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.npy.txt"
    own.write_text("cat\n\ndog\n")
    with pytest.raises(DataError, match=r"own.npy.txt: would be overwritten, because"):
        encode_file(encoder, own, tmp_path / "own.npy")
    output = tmp_path / "pool.npy"
    output.write_bytes(b"mine")
    with pytest.raises(DataError, match="this command did not write it; name another"):
        encode_file(encoder, text_file, output)
    with pytest.raises(OutputError, match="cannot be written"):
        encode_file(encoder, text_file, text_file / "pool.npy")
    assert (own.read_text(), output.read_bytes()) == ("cat\n\ndog\n", b"mine")


def test_beginning_of_something_else_is_not_gone_on_with(
    encoder: TrainedEncoder, text_file: Path, tmp_path: Path
) -> None:
    output, notes = tmp_path / "pool.npy", tmp_path / "pool.npy.json"
    begin(encoder, text_file, output, batch_size=BATCH)
    begun = files_of(tmp_path)
    with pytest.raises(DataError, match=r"pool.npy: holds 6 of 23 texts; run the same"):
        Index.load(output)
    with pytest.raises(DataError, match=r"pool.npy: exists, and was made with batch_size=2;"):
        encode_file(encoder, text_file, output, batch_size=BATCH + 1)
    make_run(tmp_path, seed=1)
    other = load_encoder(tmp_path / "run")
    with pytest.raises(DataError, match="was made with another model and max_tokens=12"):
        encode_file(other, text_file, output, batch_size=BATCH, max_tokens=5)
    assert begun.items() <= files_of(tmp_path).items()
    with text_file.open("a") as file:
        file.write("one more\n")
    with pytest.raises(DataError, match="was made with other texts; remove"):
        encode_file(encoder, text_file, output, batch_size=BATCH)
    text_file.write_bytes(begun["texts.txt"])
    before = json.loads(notes.read_text())
    for damaged in ("{", "[]", *(json.dumps({**before, "done": done}) for done in (-6, "six"))):
        notes.write_text(damaged)
        with pytest.raises(DataError, match=r"pool.npy.json: is damaged .*; remove it"):
            encode_file(encoder, text_file, output, batch_size=BATCH)
    notes.write_bytes(begun["pool.npy.json"])
    output.write_bytes(begun["pool.npy"][:-1])
    with pytest.raises(DataError, match="is shorter than it was; remove it"):
        encode_file(encoder, text_file, output, batch_size=BATCH)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "none.txt: there is no such file"),
        ("blank.txt", b"\n \n", "blank.txt: contains no text; one text per line is expected"),
        ("latin.txt", b"cat\n\xff\n", "latin.txt:2: not UTF-8"),
        ("pairs.tsv.gz", b"", "pairs.tsv.gz: is a file of pairs by its name; expected one"),
    ],
)
def test_unusable_texts_are_told(
    name: str, content: bytes | None, message: str, encoder: TrainedEncoder, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        encode_file(encoder, tmp_path / name, tmp_path / "pool.npy")
    assert not (tmp_path / "pool.npy").exists()


def test_unusable_arguments_and_models_are_told(
    run: Path, encoder: TrainedEncoder, text_file: Path, tmp_path: Path
) -> None:
    broken = load_encoder(run)
    weight = broken.model.embeddings.word.weight
    weight.set_value(weight * float("nan"))
    refused: list[tuple[TrainedEncoder, str, int, str]] = [
        (encoder, "pool.csv", 9, r"received the suffix '.csv'; allowed is .npy"),
        (encoder, "pool.npy", 1, "received max_tokens=1; allowed are whole numbers from 2"),
        (encoder, "pool.npy", 17, "received max_tokens=17; the model reads at"),
        (broken, "pool.npy", 9, "vectors are not finite; the training has diverged"),
    ]
    for model, name, tokens, words in refused:
        with pytest.raises(DataError, match=words):
            encode_file(model, text_file, tmp_path / name, max_tokens=tokens)


# ------------------------------------------------------------------------- the trained model


def test_the_checkpoint_of_a_killed_save_is_the_same_model(
    encoder: TrainedEncoder, run: Path, text_file: Path, tmp_path: Path
) -> None:
    """Its folder has another name until the run goes on."""
    shutil.copytree(run, tmp_path / "killed")
    checkpoint = tmp_path / "killed" / "checkpoint" / "step-3"
    checkpoint.rename(checkpoint.with_name(".unfinished-step-3"))
    found = load_encoder(tmp_path / "killed")
    assert found.fingerprint == encoder.fingerprint and not found.model.training
    encode_file(found, text_file, tmp_path / "pool.npy")
    checkpoint.with_name(".unfinished-step-3").rename(checkpoint)
    assert Index.load(tmp_path / "pool.npy").search(["cat"], top_k=1)[0][0].rank == 1


def test_folder_without_a_model_is_told(run: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match=r"contains no trained model; .* Name the"):
            load_encoder(folder)
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "checkpoint" / "step-3" / "state.json"
    file.write_text('{"step": 3, "config": {"model": {"layers": 2}}}')
    write_manifest(file.parent)
    with pytest.raises(CheckpointError, match=r"state.json: its configuration cannot be read"):
        load_encoder(tmp_path / "run")


# ------------------------------------------------------------------------------------------- search


@pytest.fixture(scope="module")
def pools(encoder: TrainedEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``pool.npy``."""
    folder = tmp_path_factory.mktemp("pools")
    (folder / "texts.txt").write_text("\n".join(texts(COUNT)))
    encode_file(encoder, folder / "texts.txt", folder / "npy" / "pool.npy")
    return folder / "npy"


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


def test_hits_are_those_of_brute_force(
    encoder: TrainedEncoder, pools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And sentences tell what the model does not see of a query."""
    monkeypatch.setattr(search_module, "_TILE", 7)
    told = list[str]()
    queries = ["big cat", " stone river ", "big cat " * 9, "big 猫"]
    query = encode_texts(encoder, [*map(str.strip, queries)], side="query")
    pool = encode_texts(encoder, texts(COUNT))
    scores = query.astype(np.float64) @ pool.astype(np.float64).T
    found = Index.load(pools).search(queries, top_k=1000, tell=told.append)
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


def copy_of(pools: Path, folder: Path) -> Path:
    shutil.copytree(pools, folder, dirs_exist_ok=True)
    return folder / "pool.npy"


def test_pools_that_are_not_there_are_told(pools: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pool.npy: there is no such file; `paddle-recompute enc"):
        Index.load(tmp_path / "pool.npy")
    with pytest.raises(DataError, match=r"holds no \.npy file that `encode` wrote; name one"):
        Index.load(tmp_path)
    file = copy_of(pools, tmp_path)
    for name in ("more.npy", "more.npy.json", "pool.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"holds more.npy, pool.npy that `encode` wrote; name"):
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
        ("pool.npy.txt", lambda f: f.write_text("cat\n"), "txt: has 1 texts; expected 23"),
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
