"""What a reader makes of a file is what a plain one makes of it, or the file is refused by name.

Pairs with negatives, judged queries and tokenizers: no line is lost, and nothing is read as less
than it says. `READER_EXAMPLES` is that of `test_readers`.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paddle_recompute.app.data import Pair, read_judged, read_pairs
from paddle_recompute.errors import DataError
from tests.app.data.test_judged import FILES as JUDGED
from tests.fuzz.test_readers import FOLDER, bounded, changed, reads, written

spaces = st.sampled_from(["", " ", "\t", "\u3000", "\x1c"])
words = st.text(
    st.characters(codec="utf-8", exclude_characters="\n\r\t\0") | st.sampled_from("\u2028\x85\x0c"),
    max_size=6,
).filter(lambda text: text.strip() not in ("", "0", "1"))
PLAIN_BAD = [
    b"\xff\t\xfe",
    b"\t".join([b"x" * 350] * 2),
    b"x\t" + b"y" * 599,
    b'"',
    b"[]",
    b"one column",
]
BAD_PAIRS = {
    ".tsv": [*PLAIN_BAD, b"a\t", b"\tb", b"a\tb\t", b"\t\t", b"a\tb\tc\t \td", b"a\tb\tc\tb"],
    ".jsonl": [
        *PLAIN_BAD,
        b'{"query": "a"}',
        b'{"query": "a", "positive": " "}',
        b'{"query": "a", "positive": "b", "negatives": 1}',
        b'{"query": "a", "anchor": "a", "positive": "b"}',
        b'{"query": "a", "positive": "b", "negatives": ["c", null]}',
        b'{"query": "a", "positive": "b", "negatives": ["c", "b"]}',
        b'{"query": "a", "positive": "b", "query": "c"}',
        b'{"query": "a", "positive": "b", "negativs": ["c"]}',
        b'{"query": "\\ud800", "positive": "b"}',
        b'{"query": "a", "positive": "b"',
        b'{"query": "a", "positive": "b"} {}',
    ],
}


@st.composite
def lines_of_pairs(draw: st.DrawFn, suffix: str) -> tuple[bytes, Pair | None]:
    """A line, and the pair in it; None: it is no pair."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(BAD_PAIRS[suffix])), None
    texts = draw(st.lists(words, min_size=2, max_size=6))
    first, second, *others = (text.strip() for text in texts)
    others = [text for text in others if text != second]
    if suffix == ".jsonl":
        tree: dict[str, Any] = {"positive": draw(spaces) + second, "query": first + draw(spaces)}
        if others or draw(st.booleans()):
            tree["negatives"] = others
        line = json.dumps(tree, ensure_ascii=draw(st.booleans()))
    else:
        line = "\t".join(" " + text for text in [first, second, *others])
    end = draw(st.sampled_from(["", "\r"]))
    return (line + end).encode(), Pair(first, second, tuple(others))


@bounded
@given(st.data(), st.sampled_from([".tsv", ".jsonl"]), st.booleans())
def test_each_line_is_a_pair_or_reported(data: st.DataObject, suffix: str, packs: bool) -> None:
    made = data.draw(st.lists(lines_of_pairs(suffix), max_size=8))
    least = data.draw(st.integers(0, 3))
    most = data.draw(st.sampled_from([least, 9]))
    header = [b"query\tpositive\tnegative"] if suffix == ".tsv" and data.draw(st.booleans()) else []
    blank = [b"", b" ", b"\r"][: data.draw(st.integers(0, 3))]
    content = b"\n".join([*header, *blank, *(line for line, _ in made)])
    content = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + content
    content += data.draw(st.sampled_from([b"", b"\n"]))
    name = f"q{suffix}.gz" if packs else f"q{suffix}"
    file = written(name, gzip.compress(content) if packs else content)
    is_good = [one is not None and least <= len({*one.negatives}) <= most for _, one in made]
    pairs = [one for (_, one), good in zip(made, is_good, strict=True) if good]
    bad = [number for number, good in enumerate(is_good, 1 + len(header + blank)) if not good]

    def read(on_bad_line: Any) -> Any:
        return read_pairs(file, on_bad_line=on_bad_line, max_line=600, negatives=(least, most))

    try:
        assert read("raise").pairs == pairs
        assert not bad
    except DataError as error:
        assert str(error).startswith(f"{file}:{bad[0]}: " if bad else f"{file}: contains no pair")
    if not pairs:
        reads(lambda: read("skip"))
        return
    found = read("skip")
    assert found.pairs == pairs
    assert [fault.removeprefix(f"{file}:").split(": ")[0] for fault in found.skipped] == [
        str(number) for number in bad
    ]


@bounded
@given(st.data(), st.sampled_from([".tsv", ".jsonl"]))
def test_no_line_of_a_damaged_file_is_lost(data: st.DataObject, suffix: str) -> None:
    made = data.draw(st.lists(lines_of_pairs(suffix), min_size=1, max_size=5))
    content = data.draw(changed([b"\n".join(line for line, _ in made)]))
    file = written(f"d{suffix}", content)
    try:
        found = read_pairs(file, on_bad_line="skip", max_line=600)
    except DataError as error:
        assert str(error).startswith(
            (f"{file}: contains no pair", f"{file}: is UTF-16", f"{file}: the last")
        )
        return
    space = " \r" if suffix == ".tsv" else None
    lines = [line.decode("utf-8", "replace").strip(space) for line in content.split(b"\n")]
    assert len(found.pairs) + len(found.skipped) == len([line for line in lines if line])


def plainly_judged(folder: Path) -> tuple[list[str], list[str], list[dict[int, int]]]:
    """Queries, pool and answers, with nothing checked that this does not need."""
    pool, queries, found = dict[str, str](), dict[str, str](), dict[str, dict[int, int]]()
    for name, texts in (("corpus", pool), ("queries", queries)):
        for line in (folder / f"{name}.jsonl").read_bytes().split(b"\n"):
            if line.decode().strip("\ufeff \r\t"):
                tree = json.loads(line.decode().removeprefix("\ufeff"))
                parts = [(tree.get(key) or "").strip() for key in ("title", "text")]
                assert tree["_id"].strip() not in texts
                texts[tree["_id"].strip()] = (
                    " ".join(filter(None, parts)) if texts is pool else parts[1]
                )
    for number, line in enumerate((folder / "qrels" / "test.tsv").read_bytes().split(b"\n")):
        columns = [column.strip() for column in line.decode().removeprefix("\ufeff").split("\t")]
        if columns == [""] or (number == 0 and columns == ["query-id", "corpus-id", "score"]):
            continue
        if len(columns) != 3:
            query, _, document, score = line.decode().removeprefix("\ufeff").split()
        else:
            query, document, score = columns
        assert re.fullmatch(r"[+-]?[0-9]+", score)
        row = [*pool].index(document)
        assert query in queries
        assert row not in found.get(query, {})
        found.setdefault(query, {})[row] = int(score)
    answers = {query: {r: g for r, g in some.items() if g > 0} for query, some in found.items()}
    answered = [query for query in answers if answers[query]]
    return [queries[one] for one in answered], [*pool.values()], [answers[one] for one in answered]


@st.composite
def judged_files(draw: st.DrawFn) -> dict[str, bytes]:
    documents = draw(st.lists(words, min_size=1, max_size=4, unique_by=str.strip))
    asked = draw(st.lists(words, min_size=1, max_size=4, unique_by=str.strip))
    corpus = [
        {"_id": name, "text": draw(words | st.just("")), "title": draw(words | st.none())}
        for name in documents
    ]
    queries = [{"_id": name, "text": draw(words)} for name in asked]
    both = st.tuples(st.sampled_from(asked), st.sampled_from(documents))
    judged = draw(st.lists(both, min_size=1, max_size=6, unique=True))
    scores = st.integers(-1, 3) | st.sampled_from(["+2", "1_0", "\uff11", "0.5"])
    qrels = [f"{q}\t{d}\t{draw(scores)}" for q, d in judged]
    qrels = ["query-id\tcorpus-id\tscore"] * draw(st.booleans()) + qrels
    escaped = draw(st.booleans())
    return {
        "corpus.jsonl": "\n".join(json.dumps(one, ensure_ascii=escaped) for one in corpus).encode(),
        "queries.jsonl": "\r\n".join(json.dumps(one) for one in queries).encode(),
        "qrels/test.tsv": ("\n".join(qrels) + "\n").encode(),
    }


@bounded
@given(judged_files(), st.sampled_from([None, *JUDGED]), st.data())
def test_what_is_judged(files: dict[str, bytes], damaged: str | None, data: st.DataObject) -> None:
    folder = FOLDER / "judged-2"
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(data.draw(changed([content])) if name == damaged else content)
    try:
        found = read_judged(folder, strict=True)
    except DataError as error:
        assert damaged or re.search("judges no document with a score|the score is", str(error))
        assert re.match(rf"{re.escape(str(folder))}/[a-z./]+(:[0-9]+)?: ", str(error))
        return
    assert (found.queries, found.pool, found.answers) == plainly_judged(folder)
