"""Queries with their graded answers in a pool of texts, to evaluate on.

A folder has the form of BEIR (Thakur et al., arXiv:2104.08663), each file also ``.gz``:

- ``corpus.jsonl``: ``{"_id": "d1", "title": "...", "text": "..."}``, the pool; title and text are
  joined by a space;
- ``queries.jsonl``: ``{"_id": "q1", "text": "..."}``;
- ``qrels/test.tsv``: ``query-id<TAB>corpus-id<TAB>score``, a header and one judgement per line; or
  as in TREC, also ``test.txt`` and ``test.qrels``: ``query-id 0 corpus-id score``, divided by
  whitespace. A score of 0 or less is no answer.

A file of pairs (`read_pairs`) is read, too: the pool are its positives and negatives, the answers
of a query the positives of its lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paddle_recompute.app.data.lines import BadLine, json_object, parsed, text_of, titled_text
from paddle_recompute.app.data.pairs import read_pairs
from paddle_recompute.errors import DataError

_HEADER = ["query-id", "corpus-id", "score"]
_QRELS = (".tsv", ".txt", ".qrels")
_LARGEST_SCORE = 1000
_LONGEST_SCORE = 20  # characters; int() refuses very many


@dataclass(frozen=True)
class JudgedQueries:
    """What to evaluate on.

    Attributes:
        queries: Each has an answer.
        pool: The candidates.
        answers: For each query the grade of each answer, at least 1, by its row in `pool`. A row
            below -1 is an answer that is not in the pool, and so never found.
        same_id: For each query the row in `pool` with its id; -1: none, or a file of pairs.
        notes: Sentences for the user about what was left out, with numbers.
    """

    queries: list[str]
    pool: list[str]
    answers: list[dict[int, int]]
    same_id: list[int]
    notes: list[str] = field(default_factory=list)


def read_judged(path: str | Path, *, split: str = "test", strict: bool = False) -> JudgedQueries:
    """Read a folder in the form of BEIR, or a file of pairs.

    Args:
        path: The folder or file.
        split: The name of a file in ``qrels``; without effect for a file of pairs.
        strict: Refuse a judgement of an unknown query or document, and a second one of the same
            two. Otherwise `notes` counts them. As in trec_eval, an unknown document is an answer
            that is never found; an unknown query is left out; of two judgements the last counts.

    Raises:
        DataError: A file is missing or cannot be read, a line is not what it should be, an id
            appears twice, or no query has an answer.
            Where a line is the reason, the message begins with ``file:line``.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder")
    return _from_folder(path, split, strict) if path.is_dir() else _from_pairs(path)


def _from_pairs(path: Path) -> JudgedQueries:
    if ".txt" in path.suffixes[-2:]:
        raise DataError(f"{path}: has one text per line, and no answers; name a file of pairs")
    pairs = read_pairs(path).pairs
    texts = [pair.positive for pair in pairs]
    texts += [text for pair in pairs for text in pair.negatives]
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    answers: dict[str, dict[int, int]] = {}
    for pair in pairs:
        answers.setdefault(pair.query, {})[rows[pair.positive]] = 1
    return JudgedQueries([*answers], [*rows], [*answers.values()], [-1] * len(answers))


def _from_folder(folder: Path, split: str, strict: bool) -> JudgedQueries:
    pool = _read_texts(_file(folder, "corpus.jsonl"), titled_text)
    queries = _read_texts(_file(folder, "queries.jsonl"), lambda found: text_of(found, "text"))
    rows = {name: row for row, name in enumerate(pool)}
    found: dict[str, dict[int, int]] = {}
    odd: Counter[str] = Counter()

    def count(kind: str, fault: str) -> None:
        if strict:
            raise BadLine(fault)
        odd[kind] += 1

    def judgement(number: int, line: str) -> None:
        columns = [column.strip() for column in line.rstrip("\r\n").split("\t")]
        if columns == [""] or (number == 1 and columns == _HEADER):
            return
        if len(columns) != len(_HEADER) and len(trec := line.split()) == 1 + len(_HEADER):
            columns = [trec[0], *trec[2:]]
        if len(columns) != len(_HEADER):
            raise BadLine(
                f"{len(columns)} columns, expected {'<TAB>'.join(_HEADER)}, or four as in TREC"
            )
        query, document, score = columns
        if not re.fullmatch(r"[+-]?[0-9]+", score):  # int() reads more, such as 1_0
            raise BadLine(f"the score is {score[:20]!r}, expected a whole number")
        if len(score) > _LONGEST_SCORE or abs(grade := int(score)) > _LARGEST_SCORE:
            raise BadLine(f"the score is {score[:20]}, expected at most {_LARGEST_SCORE}")
        if query not in queries:
            count("of unknown queries are left out", f"there is no query with the id {query!r}")
            return
        row = rows.setdefault(document, -2 - len(rows))
        if row < 0:
            fault = f"there is no document with the id {document!r}"
            count("of unknown documents are answers that are never found", fault)
        judged = found.setdefault(query, {})
        if row in judged:
            fault = f"query {query!r} and document {document!r} are judged twice"
            count("repeat an earlier one, and count in its place", fault)
        judged[row] = grade

    judgements = _file(folder, *(f"qrels/{split}{suffix}" for suffix in _QRELS))
    for _ in parsed(judgements, judgement):
        pass
    answers = {
        name: {row: grade for row, grade in judged.items() if grade > 0}
        for name, judged in found.items()
    }
    answered = [name for name in answers if answers[name]]
    if not answered:
        raise DataError(f"{judgements}: judges no document with a score of 1 or more")
    counts = {
        **{f"judgements {what}": number for what, number in odd.items()},
        "judged queries have no answer, and are left out": len(answers) - len(answered),
        "documents have no text": sum(not text for text in pool.values()),
    }
    return JudgedQueries(
        [queries[name] for name in answered],
        [*pool.values()],
        [answers[name] for name in answered],
        [rows.get(name, -1) for name in answered],
        [f"{count} {what}" for what, count in counts.items() if count],
    )


def _read_texts(path: Path, text: Callable[[dict[str, object]], str]) -> dict[str, str]:
    """The texts of a file, by id."""
    texts: dict[str, str] = {}

    def entry(number: int, line: str) -> None:
        if line.strip():
            found = json_object(line, "_id and text")
            name = text_of(found, "_id")
            if name in texts:
                raise BadLine(f"the id {name!r} appears twice")
            texts[name] = text(found)

    for _ in parsed(path, entry):
        pass
    if not texts:
        raise DataError(f"{path}: contains no text")
    return texts


def _file(folder: Path, *names: str) -> Path:
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.exists():
                return path
    there = sorted({path.name.split(".")[0] for path in (folder / "qrels").glob("*.*")})
    hint = f"; --split may be {', '.join(there)}" if len(names) > 1 and there else ""
    raise DataError(
        f"{folder / names[0]}: there is no such file; a folder to evaluate on has corpus.jsonl, "
        f"queries.jsonl and qrels/test.tsv, in the form of BEIR{hint}"
    )
