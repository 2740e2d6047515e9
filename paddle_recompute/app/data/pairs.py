"""Read text pairs from TSV and JSON Lines files; every bad line is reported.

A file is UTF-8, with or without a byte order mark, and may be compressed (``.gz``):

- ``.tsv``: ``query<TAB>positive[<TAB>negative...]``. There is no quoting and no escaping. The first
  line is a header if it reads exactly ``query<TAB>positive``, with any number of ``<TAB>negative``.
- ``.jsonl``: one object per line, with the strings ``query`` and ``positive`` and, if there are
  any, ``negatives``, a list of strings.

Whitespace around a text is removed. Blank lines are skipped. A negative that equals the positive of
its line is refused.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, cast

from paddle_recompute.errors import DataError

Parsed = TypeVar("Parsed")

_KEYS = ("query", "positive", "negatives")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""The byte order marks of UTF-16, with which Excel saves "Unicode text"."""


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
    """

    pairs: list[Pair]
    skipped: list[str]
    sha256: str


class BadLine(Exception):
    """A line that is not what it should be; the message says why."""


LONGEST_LINE = 1 << 20
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
        path: A ``.tsv`` or ``.jsonl`` file, also with ``.gz`` behind it.
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
    parse = partial(_checked, _parser_for(path), *negatives)
    pairs = list(parsed(path, parse, refuse, max_line, max_file, digest.update))
    if not pairs:
        first = f" ({len(skipped)} bad lines, the first: {skipped[0]})" if skipped else ""
        raise DataError(f"{path}: contains no pair{first}")
    return PairFile(pairs, skipped, digest.hexdigest())


def _raise(fault: str) -> NoReturn:
    raise DataError(fault) from None


def parsed(
    path: Path,
    parse: Callable[[int, str], Parsed | None],
    refuse: Callable[[str], object] = _raise,
    max_line: int = LONGEST_LINE,
    max_file: float = math.inf,
    read: Callable[[bytes], object] = bool,
) -> Iterator[Parsed]:
    """What `parse` makes of each line of a file; where it is None, the line is left out.

    Args:
        path: The file, also ``.gz``.
        parse: Called with the number of a line, from 1, and its text. It may raise `BadLine`.
        refuse: Given ``"file:line: what is wrong"`` for each line for which `parse` raises
            `BadLine`, or which is too long or not UTF-8. By default, that is a `DataError`.
        max_line: Bytes of the longest line.
        max_file: Bytes of the largest file, unpacked.
        read: Given all bytes.

    Raises:
        DataError: The file cannot be read, or is larger than `max_file` bytes.
    """
    for number, line in _lines(path, max_line, max_file, read):
        try:
            if len(line) > max_line:
                raise BadLine(f"longer than {max_line} bytes (the limit of pairs is data.max_line)")
            found = parse(number, _decoded(line))
        except BadLine as reason:
            refuse(f"{path}:{number}: {reason}")
        else:
            if found is not None:
                yield found


def _checked(
    parse: Callable[[int, str], Pair | None], least: float, most: float, number: int, line: str
) -> Pair | None:
    """What `parse` returns, if its negatives can be trained with."""
    pair = parse(number, line)
    if pair is None:
        return None
    count = len(set(pair.negatives))
    if pair.positive in pair.negatives:
        raise BadLine("a negative equals the positive")
    if count > most:
        raise BadLine(
            f"{count} negatives, which training would ignore; set contrastive.hard_negatives to "
            "the number of them that a pair has in a batch, or remove them"
        )
    if count < least:
        raise BadLine(
            f"{count} different negatives, fewer than contrastive.hard_negatives: {least}; add "
            "negatives, lower the number, or set contrastive.fill: random"
        )
    return pair


def _parser_for(path: Path) -> Callable[[int, str], Pair | None]:
    """The function from (line number, line) to a pair, or to None for a header or blank line."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    parsers = {".tsv": _from_tsv, ".jsonl": _from_json}
    if suffix not in parsers:
        raise DataError(
            f"{path}: the file name decides the format; it must end in .tsv, .jsonl, .tsv.gz or "
            ".jsonl.gz"
        )
    return parsers[suffix]


def _lines(
    path: Path, max_line: int, max_file: float, read: Callable[[bytes], object]
) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers, without the byte order mark.

    Of a line that is too long there are at least `max_line` + 1 bytes.
    """
    number, size, is_rest = 0, 0, False
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            # The first line may be longer by the mark.
            while line := file.readline(max_line + 1 + len(_BYTE_ORDER_MARK) * (not number)):
                read(line)
                number += not is_rest
                size += len(line)
                if size > max_file:
                    raise DataError(
                        f"{path}:{number}: the file is larger than {max_file} bytes (data.max_file)"
                        + (", unpacked" if path.suffix == ".gz" else "")
                        + "; raise the limit if it is meant to be so large"
                    )
                if number == 1 and line.startswith(_UTF_16):
                    raise DataError(f"{path}: is UTF-16; save it as UTF-8")
                if not is_rest:
                    yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
                is_rest = not line.endswith(b"\n")
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip data after line {number} ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _decoded(line: bytes) -> str:
    """The text of a line.

    Raises:
        BadLine: It is not UTF-8, or holds what comes of another encoding or other line ends.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine(
            f"not UTF-8: {error.reason} (0x{line[error.start]:02x}) at byte {error.start + 1} of "
            "the line"
        ) from None

    if "\0" in text:
        raise BadLine("not text: holds the character NUL; save the file as UTF-8")
    if "\r" in text.strip():
        raise BadLine("a carriage return inside of the line; end lines with a line feed")
    return text


def _from_tsv(number: int, line: str) -> Pair | None:
    line = line.rstrip("\r\n")
    if not line.strip(" "):
        return None
    columns = line.split("\t")
    if number == 1 and columns[:2] == ["query", "positive"] and set(columns[2:]) <= {"negative"}:
        return None
    if len(columns) == 1:
        raise BadLine("1 column, expected query<TAB>positive[<TAB>negative...]")
    texts = [column.strip() for column in columns]
    for place, text in enumerate(texts):
        if not text:
            name = ("query", "positive")[place] if place < 2 else "negative"
            raise BadLine(f"empty {name} (column {place + 1})")
    return Pair(texts[0], texts[1], tuple(texts[2:]))


def _from_json(number: int, line: str) -> Pair | None:
    if not line.strip():
        return None
    found = json_object(line, "query and positive")
    for key in found:
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise BadLine(f"unknown key '{key}'; allowed are {', '.join(_KEYS)}{hint}")
    query, positive = (text_of(found, key) for key in ("query", "positive"))
    negatives = found.get("negatives", [])
    if not isinstance(negatives, list):
        raise BadLine(f"negatives is {kind_of(negatives)}, expected a list of strings")
    named = {f"negatives[{place}]": text for place, text in enumerate(negatives)}
    return Pair(query, positive, tuple(text_of(named, name) for name in named))


def json_object(line: str, expected: str) -> dict[str, Any]:
    """The JSON object in a line, which has the keys `expected`.

    Raises:
        BadLine: It is none.
    """
    try:
        found = json.loads(line, object_pairs_hook=_without_repeated_keys)
    except json.JSONDecodeError as error:
        raise BadLine(f"not JSON: {error.msg} at character {error.pos + 1} of the line") from None
    except ValueError as error:  # Python reads no number of more than 4300 digits
        raise BadLine(f"not JSON: {error}") from None
    except RecursionError:
        raise BadLine("not a pair: JSON nested too deep") from None
    if not isinstance(found, dict):
        raise BadLine(f"{kind_of(found)}, expected an object with {expected}")
    return found


def _without_repeated_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(items)
    if len(found) < len(items):
        keys = [key for key, _ in items]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise BadLine(f"key '{repeated}' appears twice")
    return found


def text_of(found: dict[str, Any], key: str) -> str:
    """The text of a key, without whitespace around it.

    Raises:
        BadLine: There is none.
    """
    if key not in found:
        raise BadLine(f"no {key}")
    if not isinstance(found[key], str):
        raise BadLine(f"{key} is {kind_of(found[key])}, expected a string")
    text = cast(str, found[key]).strip()
    if not text:
        raise BadLine(f"empty {key}")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise BadLine(f"{key} contains half of a surrogate pair (an escape \\ud800 to \\udfff)")
    return text


def kind_of(value: object) -> str:
    """The JSON name of the type of `value`."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
