"""Reading pairs: what goes in comes out, and every way a line can be wrong has its own words.

Round trips of both kinds, blank lines and ends of lines: tests/fuzz/test_what_readers_read.py.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paddle_recompute.app.data import Pair, read_pairs
from paddle_recompute.errors import DataError


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_what_is_a_header_and_what_is_data(tmp_path: Path) -> None:
    for first in ("query\tanswer", "Query\tPositive", "a\tb\tquery"):
        found = read_pairs(write(tmp_path, "pairs.tsv", f"{first}\n猫\tcat\n"))
        assert len(found.pairs) == 2
    found = read_pairs(write(tmp_path, "pairs.tsv", "猫\tcat\nquery\tpositive\n"))
    assert found.pairs[1] == Pair("query", "positive")
    with pytest.raises(DataError, match=r"its header has the column 'other'; allowed are query,"):
        read_pairs(write(tmp_path, "pairs.tsv", "query\tpositive\tother\n猫\tcat\n"))


BAD_TSV: dict[str, str | bytes] = {
    r"not UTF-8: invalid continuation byte \(0xe9\) at byte 4 of the line": b"caf\xe9\tb",
    "1 column, expected query<TAB>positive": "lonely",
    r"empty query \(column 1\)": "\tcat",
    r"empty positive \(column 2\)": "猫\t 　",
    r"empty negative \(column 3\)": "猫\tcat\t",
    "a negative equals the positive": "猫\tcat\tcat",
    "not text: holds the character NUL; save the file as UTF-8": "c\0a\0\tt",
    "a carriage return inside of the line; end lines with a line feed": "a\tb\rc\td",
}
BAD_JSON: dict[str, Any] = {
    "not JSON: Expecting ',' delimiter at character 18 of the line": '{"query": "cat"  "positive"}',
    "not a pair: JSON nested too deep": "[" * 100_000,
    "a list, expected an object with query and positive": ["a", "b"],
    "a boolean, expected an object": True,
    "a number, expected an object": 1.5,
    "no query": {"positive": "cat"},
    "positive is null, expected a string": {"query": "cat", "positive": None},
    "empty query": {"query": " ", "positive": "cat"},
    "negatives is a number, expected a string": {"query": "a", "positive": "b", "negatives": 1},
    r"negatives\[1\] is an object, expected a string": {
        "query": "a",
        "positive": "b",
        "negatives": ["c", {}],
    },
    r"empty negatives\[0\]": {"query": "a", "positive": "b", "negatives": [""]},
    "unknown key 'posative'; allowed are query, anchor, .*; did you mean 'positive'": {
        "query": "a",
        "posative": "b",
    },
    "unknown key 'scores'; allowed are query, anchor, ": {"query": "a", "scores": 1},
    "the keys 'query' and 'anchor' mean the same": {"query": "a", "anchor": "a", "pos": "b"},
    "no positive: pos is an empty list": {"query": "a", "pos": []},
    r"empty pos\[1\]": {"query": "a", "pos": ["b", {"title": " ", "text": ""}]},
    "pos is an object, expected a string": {"query": "a", "pos": {"title": "b"}},
    "the label is '2', expected 0 or 1": {"query": "a", "pos": "b", "label": 2},
    r"a negative equals the positive": {"query": "a", "pos": ["b", "c"], "neg": ["c"]},
    "key 'query' appears twice": '{"query": "a", "query": "b", "positive": "c"}',
    r"query contains half of a surrogate pair \(an escape": {"query": "a\ud800", "positive": "b"},
}
CASES: list[tuple[str, str | bytes, str]] = [
    *(("tsv", bad, reason) for reason, bad in BAD_TSV.items()),
    *(
        ("jsonl", bad if isinstance(bad, str) else json.dumps(bad), reason)
        for reason, bad in BAD_JSON.items()
    ),
]


@pytest.mark.parametrize(("kind", "bad", "reason"), CASES, ids=[case[2][:40] for case in CASES])
def test_bad_line(tmp_path: Path, kind: str, bad: str | bytes, reason: str) -> None:
    good = {"tsv": "猫\tcat", "jsonl": '{"query": "猫", "positive": "cat"}'}[kind].encode()
    content = b"\n".join([good, bad.encode() if isinstance(bad, str) else bad, good])
    path = write(tmp_path, f"pairs.{kind}", content)
    with pytest.raises(DataError, match=rf"^{path}:2: {reason}.*data\.on_bad_line: skip"):
        read_pairs(path)
    found = read_pairs(path, on_bad_line="skip")
    assert found.pairs == [Pair("猫", "cat")] * 2
    assert len(found.skipped) == 1
    with pytest.raises(DataError, match=reason):
        raise DataError(found.skipped[0])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_refused_as_a_whole(tmp_path: Path, encoding: str) -> None:
    """Excel's "Unicode text"; without its mark each line holds NUL."""
    file = tmp_path / "pairs.tsv"
    file.write_bytes("cat\tbig cat\ndog\tbig dog\n".encode(encoding))
    words = "is UTF-16; save it as UTF-8" if encoding == "utf-16" else "contains no pair .*NUL"
    with pytest.raises(DataError, match=words):
        read_pairs(file, on_bad_line="skip")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name in ("pairs.csv", "pairs.gz", "tsv"):
        with pytest.raises(
            DataError,
            match=r"must end in .*\.json, \.txt, or in one of them and \.gz",
        ):
            read_pairs(write(tmp_path, name, "猫\tcat\n"))
    with pytest.raises(DataError, match=r"pairs\.tsv: there is no such file"):
        read_pairs(tmp_path / "pairs.tsv")
    with pytest.raises(DataError, match=rf"no such file in the current folder, {Path.cwd()}"):
        read_pairs(Path("pairs.tsv"))
    (tmp_path / "folder.tsv").mkdir()
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\)"):
        read_pairs(tmp_path / "folder.tsv")


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = gzip.compress("".join(f"{n}\t{n * n}\n" for n in range(5000)).encode())
    for damaged in (whole[: len(whole) // 2], whole[:-8] + bytes(8), b"plain text\tof two\n"):
        (tmp_path / "pairs.tsv.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"damaged gzip data after line \d+ \("):
            read_pairs(tmp_path / "pairs.tsv.gz")


# ------------------------------------------------------------------------------ files of people

DPR = [
    {
        "dataset": "nq",
        "question": "q1",
        "answers": ["a"],
        "positive_ctxs": [
            {"title": "T", "text": "p1", "score": 9, "passage_id": "1"},
            {"title": "", "text": "p2"},
        ],
        "negative_ctxs": [{"title": "T", "text": "random"}],
        "hard_negative_ctxs": [{"title": "T", "text": "n1"}],
    },
    {"question": "q2", "positive_ctxs": [{"text": "p3"}], "hard_negative_ctxs": []},
]
NOT_USED = "the keys answers, dataset, negative_ctxs are not used"
LABELLED = [Pair("a", "b"), Pair("c", "d")]
PEOPLE = {
    "label": ("p.tsv", "a\tb\t1\na\tx\t0\nc\td\t1\n", LABELLED, "1 lines have label 0 and"),
    "label-header": (
        "p.tsv",
        "text_a\ttext_b\tlabel\r\na\tb\t1\r\na\tx\t0\r\nc\td\t1\r\n",
        LABELLED,
        "1 lines have label 0 and are no pairs",
    ),
    "label-json": (
        "p.jsonl",
        '{"sentence1": "a", "sentence2": "b", "label": 1}\n'
        '{"sentence1": "a", "sentence2": "x", "label": "0"}\n'
        '{"sentence1": "c", "sentence2": "d", "label": true}\n',
        LABELLED,
        "1 lines have label 0 and are no pairs",
    ),
    "title": (
        "p.tsv",
        "query\ttitle\tpositive\tlabel\na\tT\tb\t1\na\tT\tx\t0\nc\t-\td\t1\ne\t\tf\t1\n",
        [Pair("a", "T b"), Pair("c", "d"), Pair("e", "f")],
        "1 lines have label 0 and are no pairs",
    ),
    "triplets": (
        "p.tsv",
        "anchor\tpositive\tnegative\na\tb\tc\nd\te\n",
        [Pair("a", "b", ("c",)), Pair("d", "e")],
        "",
    ),
    "order": ("p.tsv", "pos\tquery\nb\ta\nd\tc\n", LABELLED, ""),
    "texts": ("p.txt", "a\n\n b\tc \r\n", [Pair("a", "a"), Pair("b\tc", "b\tc")], "2 texts are th"),
    "sentence-transformers": (
        "p.jsonl",
        '{"anchor": "a", "positive": "b", "negative": "c"}\n',
        [Pair("a", "b", ("c",))],
        "",
    ),
    "flag": (
        "p.json",
        '{"query": "a", "pos": ["b", "c", "b"], "neg": ["d"], "id": 7}\n',
        [Pair("a", "b", ("d",)), Pair("a", "c", ("d",))],
        "the keys id are not used",
    ),
    "dpr": (
        "p.json.gz",
        json.dumps(DPR, indent=4),
        [Pair("q1", "T p1", ("T n1",)), Pair("q1", "p2", ("T n1",)), Pair("q2", "p3")],
        NOT_USED,
    ),
    "tevatron": (
        "p.jsonl",
        '{"query_id": "1", "query": "q", "positive_passages": [{"docid": "1", "text": "p"}], '
        '"negative_passages": [{"docid": "2", "title": "T", "text": "n"}]}\n',
        [Pair("q", "p", ("T n",))],
        "the keys query_id are not used",
    ),
}


@pytest.mark.parametrize("case", PEOPLE)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_files_of_people(case: str, mark: str, tmp_path: Path) -> None:
    name, content, pairs, note = PEOPLE[case]
    path = write(tmp_path, name, mark + content)
    found = read_pairs(path)
    assert found.pairs == pairs
    assert (found.notes, found.skipped) == ([], []) if not note else note in found.notes[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.tsv", "a\tb\t0\nc\td\t0\n", r"contains no pair \(.*: 2 lines have label 0 and are"),
        ("p.tsv", "a\tb\t1\nc\td\te\n", r"p.tsv:2: the label is 'e', expected 0 or 1"),
        ("p.tsv", "a\tb\t1\nc\td\n", r"p.tsv:2: 2 columns, expected query<TAB>positive<TAB>label"),
        (
            "p.tsv",
            "a\tT\tb\t1\n",
            r"p.tsv: the last of 4 columns seems to be a label or a score, 1; a",
        ),
        ("p.tsv", "a\tb\t0.5\nc\td\t4\n", r"seems to be a label or a score, 0.5; a label is 0"),
        ("p.tsv", "query\tpositive\tid\n", r"p.tsv: its header has the column 'id'; allowed are"),
        (
            "p.json",
            '[{"query": "a", "positive": "b"}, []]',
            r"p.json:2: a list, expected an obj",
        ),
        ("p.json", '[{"query": "a", "positive": ', r"p.json: not JSON: Expecting value"),
        ("p.json", '[{"query": "a", "query": ""}]', r"p.json: not JSON: key 'query' appears twice"),
        ("p.json", "[" * 100_000, r"p.json: not JSON: "),
        ("p.json", "[]", r"p.json: contains no pair"),
        (
            "p.json",
            '[{"question": "a", "positive_ctxs": []}]',
            r"p.json:1: no positive: posit",
        ),
        ("p.txt", " \n", r"p.txt: contains no pair$"),
        ("p.tsv", "query\tpositive\n\n", r"p.tsv: contains no pair$"),
    ],
)
def test_odd_files_of_people(name: str, content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_pairs(write(tmp_path, name, content))
