"""Folders in the form of BEIR, files of pairs, and what is wrong with them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from paddle_recompute.app.data import read_judged
from paddle_recompute.errors import DataError

FILES = {
    "corpus.jsonl": '{"_id": "d1", "title": "Cats", "text": "purr", "metadata": {"a": 1}}\n'
    '{"_id": "d2", "text": " dogs bark "}\n\n{"_id": "q2", "title": " ", "text": "\\t"}\n',
    "queries.jsonl": '{"_id": "q1", "text": "pets"}\n{"_id": "q2", "text": "cats"}\n'
    '{"_id": "q3", "text": "birds"}\n',
    "qrels/test.tsv": "query-id\tcorpus-id\tscore\nq2\td2\t1\nq1\td2\t2\nq1\td1\t1\nq1\tq2\t0\n"
    "q3\td1\t-1\n",
}


def written(folder: Path, **changes: str) -> Path:
    """`FILES`; a change is named by the file, without its suffix and folder."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(changes.get(path.stem, text), encoding="utf-8")
    return folder


def test_folder(tmp_path: Path) -> None:
    found = read_judged(written(tmp_path))
    assert found.queries == ["cats", "pets"]
    assert found.pool == ["Cats purr", "dogs bark", ""]
    assert found.answers == [{1: 1}, {1: 2, 0: 1}]
    assert found.same_id == [2, -1]
    assert found.notes == [
        "1 judged queries have no answer, and are left out",
        "1 documents have no text",
    ]


def test_pairs(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("a\tb\tc\na\td\ne\tb\n")
    found = read_judged(file)
    assert (found.queries, found.pool) == (["a", "e"], ["b", "d", "c"])
    assert found.answers == [{0: 1, 1: 1}, {0: 1}]
    assert found.same_id == [-1, -1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("corpus", '{"_id": "d1"}\n', "corpus.jsonl:1: no text"),
        ("corpus", '{"_id": "a", "text": "b"}\n' * 2, r"corpus.jsonl:2: the id 'a' appears twice"),
        ("corpus", "\n", "corpus.jsonl: contains no text"),
        ("queries", '{"_id": "q1", "text": " "}\n', "queries.jsonl:1: empty text"),
        ("test", "q1\td1\n", r"test.tsv:1: 2 columns, expected query-id<TAB>corpus-id<TAB>score"),
        ("test", "q1\td1\t0.5\n", r"test.tsv:1: the score is '0.5', expected a whole number"),
        ("test", "q1\td1\t1_0\n", r"test.tsv:1: the score is '1_0', expected a whole number"),
        ("test", f"q1\td1\t{'9' * 5000}\n", r"test.tsv:1: the score is 9{20}, expected at most 10"),
        ("test", "q1\td1\t0\n", "test.tsv: judges no document with a score of 1 or more"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        read_judged(written(tmp_path, **{name: text}))


ODD = "\nq9\td1\t1\nq1\td9\t1\nq1\td2\t1\nq1\td8\t2\nq1\td1\t1\nq1\td2\t2\nq2\td9\t1\n"


def test_odd_judgements_are_counted(tmp_path: Path) -> None:
    """An unknown document is an answer that is never found, as in trec_eval."""
    found = read_judged(written(tmp_path, test=ODD))
    assert (found.queries, found.pool) == (["pets", "cats"], ["Cats purr", "dogs bark", ""])
    (d9, of_d9), *others = found.answers[0].items()
    assert d9 < -1
    assert [of_d9, *others[:1]] == [1, (1, 2)]
    assert found.answers[1] == {d9: 1}
    assert len({row for answers in found.answers for row in answers}) == 4
    assert found.notes[:3] == [
        "1 judgements of unknown queries are left out",
        "3 judgements of unknown documents are answers that are never found",
        "1 judgements repeat an earlier one, and count in its place",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nq9\td1\t1\n", r"test.tsv:2: there is no query with the id 'q9'"),
        ("q1\td9\t1\n", r"test.tsv:1: there is no document with the id 'd9'"),
        ("q1\td1\t1\nq1\td1\t1\n", r"test.tsv:2: query 'q1' and document 'd1' are judged twice"),
    ],
)
def test_odd_judgements_are_refused_if_asked(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_judged(written(tmp_path, test=text), strict=True)


@pytest.mark.parametrize("suffix", ["tsv", "txt", "qrels", "txt.gz"])
def test_judgements_of_trec(suffix: str, tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "queries.jsonl").write_text(FILES["queries.jsonl"].replace("q3", "q 3"))
    (tmp_path / "qrels" / "spaces.tsv").write_text("q 3\td1\t1\n")
    assert read_judged(tmp_path, split="spaces").queries == ["birds"]
    written(tmp_path)
    lines = b"q2 0 d2 1\r\nq1\tQ0\td2\t2\n\nq1  0  d1 1\nq3 0 d1 -1\n"
    packed = gzip.compress(lines) if suffix.endswith("gz") else lines
    (tmp_path / "qrels" / f"trec.{suffix}").write_bytes(packed)
    found = read_judged(tmp_path, split="trec")
    assert (found.queries, found.answers) == (["cats", "pets"], [{1: 1}, {1: 2, 0: 1}])


def test_missing_files_are_named(tmp_path: Path) -> None:
    (written(tmp_path / "whole") / "qrels" / "dev.tsv.gz").touch()
    with pytest.raises(DataError, match=r"train.tsv: there is no such .*--split may be dev, test"):
        read_judged(tmp_path / "whole", split="train")
    with pytest.raises(DataError, match=r"corpus.jsonl: there is no such file; a folder to eval"):
        read_judged(tmp_path)
    (tmp_path / "texts.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"texts\.txt: has one text per line, and no answers"):
        read_judged(tmp_path / "texts.txt")
    with pytest.raises(DataError, match="there is no such file"):
        read_judged(tmp_path / "pairs.tsv")
