"""Read text pairs from the files that people have; every bad line is reported.

A file is UTF-8, with or without a byte order mark, and may be compressed (``.gz``):

- ``.tsv``: ``query<TAB>positive[<TAB>negative...]``. There is no quoting and no escaping. The first
  line may be a header of other columns: ``query``, ``title`` (of the positive), ``positive``,
  ``negative`` and ``label``. Without a header, a third column of 0 or 1 in the first line makes it
  the label of all lines, and another number there is refused. Label 0 is no pair.
- ``.jsonl``: one object per line, with the keys of `_NAMES`: ``query``, ``positive`` (or several, a
  list) and ``negatives``, each a string or an object with ``title`` and ``text``.
- ``.json``: the same as a list, as DPR has it, or as lines.
- ``.txt``: one text per line, its own positive (SimCSE).

Whitespace around a text is removed. Blank lines are skipped. A negative that equals the positive of
its line is refused.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paddle_recompute.app.data.lines import (
    LONGEST_LINE,
    BadLine,
    json_object,
    parsed,
    text_of,
    titled_text,
)
from paddle_recompute.errors import DataError

_NAMES = {
    **dict.fromkeys(("query", "anchor", "question", "text_a", "sentence1"), "query"),
    **dict.fromkeys(("positive", "pos", "positives", "text_b", "sentence2"), "positive"),
    **dict.fromkeys(("passage", "positive_ctxs", "positive_passages"), "positive"),
    **dict.fromkeys(("negatives", "negative", "neg", "hard_negative_ctxs"), "negative"),
    "negative_passages": "negative",
    "title": "title",
    "label": "label",
}
"""What a key, or a column of a header, holds."""
_NOT_USED = {"_id", "id", "query_id", "dataset", "answers", "negative_ctxs"}
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_NO_TITLE = ("", "-", "null")
_SUFFIXES = (".tsv", ".jsonl", ".json", ".txt")


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and the text that answers it.

    Attributes:
        query: Never empty.
        positive: Never empty.
        negatives: Texts that look like an answer to the query and are not.
    """

    query: str
    positive: str
    negatives: tuple[str, ...] = ()


@dataclass(frozen=True)
class PairFile:
    """The content of a file.

    Attributes:
        pairs: In file order, duplicates included.
        skipped: ``"file:line: what is wrong"`` for each line that was skipped.
        sha256: Of the whole content, unpacked.
        notes: Sentences for the user about how the file was read, with numbers.
    """

    pairs: list[Pair]
    skipped: list[str]
    sha256: str
    notes: list[str] = field(default_factory=list)


LARGEST_FILE = 8 << 30


def read_pairs(
    path: str | Path,
    *,
    on_bad_line: Literal["raise", "skip"] = "raise",
    max_line: int = LONGEST_LINE,
    max_file: int = LARGEST_FILE,
    negatives: tuple[float, float] = (0, math.inf),
) -> PairFile:
    r"""Read all pairs of one file.

    Args:
        path: A ``.tsv``, ``.jsonl``, ``.json`` or ``.txt`` file, also with ``.gz`` behind it.
        on_bad_line: ``raise`` stops at the first line that is not a pair; ``skip`` skips such lines
            and lists them in the result.
        max_line: Bytes of the longest line; a longer one is no pair.
        max_file: Bytes of the largest file, unpacked. A file of 1 MB may unpack to 1 GB.
        negatives: The least and the largest number of different negatives of a line.

    Returns:
        The pairs, at least one, and the lines that were skipped.

    Raises:
        DataError: The file cannot be read, has another format or contains no pair, or, with
            ``raise``, a line is not a pair.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "pairs.tsv"
        >>> _ = file.write_text("query\tpositive\n猫\tcat\n狗\n", encoding="utf-8")
        >>> found = read_pairs(file, on_bad_line="skip")
        >>> found.pairs
        [Pair(query='猫', positive='cat', negatives=())]
        >>> found.skipped[0].removeprefix(str(file))
        ':3: 1 column, expected query<TAB>positive[<TAB>negative...]'
    """
    path = Path(path)
    skipped: list[str] = []

    def refuse(fault: str) -> None:
        if on_bad_line == "raise":
            raise DataError(
                f"{fault}; correct or remove the line. In training, data.on_bad_line: skip skips "
                "and counts such lines"
            ) from None
        skipped.append(fault)

    digest = hashlib.sha256()
    parser = _Parser(path, *negatives)
    found = parsed(path, parser.parse, refuse, max_line, max_file, digest.update)
    pairs = [pair for some in found for pair in some]
    notes = parser.notes()
    if not pairs:
        why = [f"{len(skipped)} bad lines, the first: {skipped[0]}"] if skipped else notes
        raise DataError(f"{path}: contains no pair" + "".join(f" ({reason})" for reason in why))
    return PairFile(pairs, skipped, digest.hexdigest(), notes)


class _Parser:
    """Makes pairs of the lines of one file.

    Args:
        path: Its name decides the format.
        least: Of a pair, the fewest different negatives.
        most: The most.
    """

    def __init__(self, path: Path, least: float, most: float) -> None:
        suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
        if suffix not in _SUFFIXES:
            raise DataError(
                f"{path}: the file name decides the format; it must end in "
                f"{', '.join(_SUFFIXES)}, or in one of them and .gz"
            )
        by_format = {".tsv": self._from_tsv, ".txt": self._from_text}
        self.parse = by_format.get(suffix, self._from_json)
        self._path, self._least, self._most = path, least, most
        self._columns: list[str] = []
        self._counts: Counter[str] = Counter()

    def notes(self) -> list[str]:
        """What the lines held beside pairs."""
        counts = self._counts
        told = {
            "lines have label 0 and are no pairs": counts.pop("label", 0),
            "texts are their own positives (unsupervised SimCSE); held-out ones find themselves: "
            "evaluate on pairs (data.valid_file)": counts.pop("text", 0),
        }
        notes = [f"{self._path}: {number} {what}" for what, number in told.items() if number]
        if counts:
            notes.append(f"{self._path}: the keys {', '.join(sorted(counts))} are not used")
        return notes

    def _from_text(self, number: int, line: str) -> list[Pair]:
        text = line.strip()
        self._counts["text"] += bool(text)
        return [Pair(text, text)] if text else []

    def _from_tsv(self, number: int, line: str) -> list[Pair]:
        line = line.rstrip("\r\n")
        if not line.strip(" "):
            return []
        columns = [column.strip() for column in line.split("\t")]
        if not self._columns and self._is_header(columns):
            return []
        names = self._columns
        if names[-1] == "negative":  # there may be any number of them
            names = names + ["negative"] * (len(columns) - len(names))
        elif len(columns) != len(names):
            raise BadLine(f"{len(columns)} columns, expected {'<TAB>'.join(names)}")
        if len(columns) == 1:
            raise BadLine("1 column, expected query<TAB>positive[<TAB>negative...]")
        texts: dict[str, list[str]] = {name: [] for name in _NAMES.values()}
        for index, (name, text) in enumerate(zip(names, columns, strict=False), 1):
            if not text and name != "title":
                raise BadLine(f"empty {name} (column {index})")
            texts[name].append(text)
        return self._pairs(texts)

    def _is_header(self, columns: list[str]) -> bool:
        """Take the names of the columns from the first line; returns whether it is a header."""
        self._columns = ["query", "positive", "negative"]
        names = [_NAMES.get(column) for column in columns]
        if {"query", "positive"} <= {*names}:
            known = [name for name in names if name is not None]
            if len(known) < len(names):
                raise DataError(
                    f"{self._path}: its header has the column {columns[names.index(None)]!r}; "
                    f"allowed are {', '.join(_NAMES)}"
                )
            self._columns = known + ["negative"] * (len(known) == 2)
            return True
        if _NUMBER.fullmatch(columns[-1]) and len(columns) > len(("query", "positive")):
            self._columns[2:] = ["label"]
            if len(columns) > len(self._columns) or columns[-1] not in ("0", "1"):
                raise DataError(
                    f"{self._path}: the last of {len(columns)} columns seems to be a label or a "
                    f"score, {columns[-1]}; a label is 0 or 1. Name the columns in a first line, "
                    "such as query<TAB>title<TAB>positive<TAB>label"
                )
        return False

    def _from_json(self, number: int, line: str | dict[str, Any]) -> list[Pair]:
        if isinstance(line, str) and not line.strip():
            return []
        found = json_object(line, "query and positive")
        keys: dict[str, str] = {}
        for key in found:
            if key in _NOT_USED:
                self._counts[key] += 1
                continue
            if key not in _NAMES:
                near = difflib.get_close_matches(key, _NAMES, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise BadLine(f"unknown key '{key}'; allowed are {', '.join(_NAMES)}{hint}")
            if (other := keys.setdefault(_NAMES[key], key)) != key:
                raise BadLine(f"the keys '{other}' and '{key}' mean the same")
        for name in ("query", "positive"):
            if name not in keys:
                raise BadLine(f"no {name}")
        label = found.get("label", 1)
        texts = {
            "query": [text_of(found, keys["query"])],
            "positive": _texts(found, keys["positive"]),
            "negative": _texts(found, keys["negative"]) if "negative" in keys else [],
            "title": [text_of(found, "title")] if found.get("title") else [],
            "label": [str(int(label) if isinstance(label, bool) else label)],
        }
        return self._pairs(texts)

    def _pairs(self, texts: Mapping[str, Sequence[str]]) -> list[Pair]:
        """A pair for each positive, with negatives that can be trained with."""
        [query], negatives = texts["query"], texts["negative"]
        if not {"0", "1"}.issuperset(texts["label"]):
            raise BadLine(f"the label is '{texts['label'][0]:.40}', expected 0 or 1")
        if "0" in texts["label"]:
            self._counts["label"] += 1
            return []
        title = [text for text in texts["title"] if text not in _NO_TITLE]
        positives = [" ".join([*title, text]) for text in texts["positive"]]
        count = len(set(negatives))
        if not set(positives).isdisjoint(negatives):
            raise BadLine("a negative equals the positive")
        if count > self._most:
            raise BadLine(
                f"{count} negatives, which training would ignore; set contrastive.hard_negatives "
                "to the number of them that a pair has in a batch, or remove them"
            )
        if count < self._least:
            raise BadLine(
                f"{count} different negatives, fewer than contrastive.hard_negatives: "
                f"{self._least}; add negatives, lower the number, or set contrastive.fill: random"
            )
        return [Pair(query, positive, tuple(negatives)) for positive in dict.fromkeys(positives)]


def _texts(found: dict[str, Any], key: str) -> list[str]:
    """The texts of a key: a text or a list of texts, each a string or with ``title`` and ``text``.

    Raises:
        BadLine: There is none.
    """
    value = found[key]
    given = value if isinstance(value, list) else [value]
    named = {
        f"{key}[{index}]" if given is value else key: content for index, content in enumerate(given)
    }
    texts = []
    for name, content in named.items():
        text = (
            titled_text(content)
            if isinstance(content, dict) and "text" in content
            else text_of(named, name)
        )
        if not text:
            raise BadLine(f"empty {name}")
        texts.append(text)
    if not texts and _NAMES[key] == "positive":
        raise BadLine(f"no positive: {key} is an empty list")
    return texts
