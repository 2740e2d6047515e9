"""Chinese and English sentences of LibreOffice, mined on the user's machine and never committed.

Two sources, both under MPL-2.0 (https://www.mozilla.org/MPL/2.0/), from three Debian packages:

- the help: paragraphs and headings that have the same id on the same page in both languages;
- the user interface: the message catalogues, whose keys are the English texts.

A *page* is a help page, or a dialog of the user interface. Pages are held out as a whole, and a
training pair that repeats a held-out text is dropped: the help says many things on several pages.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from paddle_recompute.app.data._cache_folder import write_whole
from paddle_recompute.app.data.pairs import Pair
from paddle_recompute.app.data.split import normal_form, shuffling_key
from paddle_recompute.errors import DataError

PACKAGES = ("libreoffice-help-zh-cn", "libreoffice-help-en-us", "libreoffice-l10n-zh-cn")

# Part of the name of the file: to be raised with every change to what is mined.
_VERSION = 1
_MO_MAGIC = 0x950412DE
_TIMEOUT = 300  # seconds for one package
_CHINESE = re.compile(r"[\u3400-\u9fff]")
_PARAGRAPH = re.compile(r"(?:par|hd)_id\w+")
_PARAGRAPH_TAGS = frozenset({"p", "h1", "h2", "h3", "h4", "h5", "h6"})
# 文件(_F), _File, ~File: the letter that opens a menu entry
_ACCESS_KEY = re.compile(r"\s*\([_~]\w\)|[_~](?=\w)")


@dataclass(frozen=True)
class PagePair:
    """A pair and the page that it was found on."""

    page: str
    pair: Pair


@dataclass(frozen=True)
class PageSplit:
    """Pairs whose pages, and whose texts, are on one side only.

    Attributes:
        train: To train on.
        valid: To choose by.
        test: To report.
    """

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]


def mine_libreoffice(cache_dir: Path) -> Path:
    """Fetch the packages, once, and write what they hold as ``page<TAB>zh<TAB>en``.

    Needs Debian's or Ubuntu's ``apt-get`` and ``dpkg``, and the network unless the ``.deb`` files
    are in ``cache_dir/debs``. 6 MB to fetch; about ten seconds.
    """
    debs = _packages(cache_dir / "debs")
    version = debs[0].name.split("_")[1].replace("%3a", "-")
    path = cache_dir / f"libreoffice-{version}-v{_VERSION}.tsv"
    if not path.exists():
        root = cache_dir / "unpacked"
        for deb in debs:
            _run(["dpkg", "-x", str(deb), str(root)])
        lines = [
            f"{found.page}\t{found.pair.query}\t{found.pair.positive}\n"
            for found in (*_help_pairs(root), *_interface_pairs(root))
        ]
        shutil.rmtree(root)
        if not lines:
            raise DataError(f"{', '.join(PACKAGES)} {version}: no pair was found in them")
        write_whole(path, "".join(lines))
    return path


def read_mined(path: Path) -> list[PagePair]:
    """What `mine_libreoffice` has written."""
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return [PagePair(page, Pair(query, positive)) for page, query, positive in rows]


def split_by_page(found: Iterable[PagePair], *, held_out: int, seed: int) -> PageSplit:
    """Hold whole pages out, first for the test, then for the choice of settings.

    Every text, in `normal_form`, is once in the result, so that every query has one right answer
    in a pool, and no batch holds a false negative by repetition.

    Args:
        found: All pairs.
        held_out: Pages are taken until a side has at least so many pairs.
        seed: Shuffles the pages.
    """
    pages: dict[str, list[Pair]] = {}
    for one in found:
        pages.setdefault(one.page, []).append(one.pair)
    seen: tuple[set[str], set[str]] = set(), set()
    sides: tuple[list[Pair], list[Pair], list[Pair]] = [], [], []  # test, valid, train
    place = 0
    for page in sorted(pages, key=lambda name: shuffling_key(name, seed)):
        if place < 2 and len(sides[place]) >= held_out:
            place += 1
        for pair in pages[page]:
            keys = normal_form(pair.query), normal_form(pair.positive)
            if keys[0] not in seen[0] and keys[1] not in seen[1]:
                seen[0].add(keys[0])
                seen[1].add(keys[1])
                sides[place].append(pair)
    if place < 2 or not sides[2]:
        raise DataError(
            f"held_out is {held_out}, and {len(pages)} pages with "
            f"{sum(map(len, pages.values()))} pairs leave nothing to train on; hold out fewer"
        )
    test, valid, train = sides
    return PageSplit(train, valid, test)


def paragraphs(html: str) -> dict[str, str]:
    """The text of every paragraph and heading of a help page, by its id.

    What is shown on one operating system or in one program only is left out, but for the text
    that stands for all others. An id that is there twice is left out.
    """
    reader = _Paragraphs()
    reader.feed(html)
    reader.close()
    return {name: text for name, text in reader.texts.items() if name not in reader.repeated}


def read_catalogue(data: bytes) -> dict[str, str]:
    r"""The messages of a ``.mo`` file (GNU gettext): ``context\x04English`` to the translation."""
    magic, _, count, keys_at, texts_at = struct.unpack_from("<5I", data)
    if magic != _MO_MAGIC:
        raise DataError(f"not a little-endian .mo file: it begins with {data[:4]!r}")
    return {
        _message(data, keys_at + 8 * number): _message(data, texts_at + 8 * number)
        for number in range(count)
    }


def clean_interface_text(text: str) -> str:
    """A text of a dialog without the marks for access keys.

    Examples:
        >>> clean_interface_text("文件(_F)"), clean_interface_text("~Open...")
        ('文件', 'Open...')
    """
    return " ".join(_ACCESS_KEY.sub("", text).split())


class _Paragraphs(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.texts: dict[str, str] = {}
        self.repeated: set[str] = set()
        self._open: tuple[str, str] | None = None  # tag, id
        self._parts: list[str] = []
        # One entry per open span of the paragraph: whether its text is left out.
        self._spans: list[bool] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in _PARAGRAPH_TAGS:
            name = given.get("id") or ""
            self._open = (tag, name) if _PARAGRAPH.fullmatch(name) else None
            self._parts, self._spans = [], []
        elif tag == "span":
            # Hidden with a class: for one system or program. Hidden without: for all others.
            self._spans.append("hidden" in given and bool(given.get("class")))

    def handle_endtag(self, tag: str) -> None:
        if tag == "span" and self._spans:
            self._spans.pop()
        if self._open is None or tag != self._open[0]:
            return
        name, self._open = self._open[1], None
        if name in self.texts:
            self.repeated.add(name)
        self.texts[name] = " ".join("".join(self._parts).split())

    def handle_data(self, data: str) -> None:
        if self._open is not None and not any(self._spans):
            self._parts.append(data)


def _help_pairs(root: Path) -> Iterator[PagePair]:
    chinese, english = (root / "usr/share/libreoffice/help" / name for name in ("zh-CN", "en-US"))
    for page in sorted((chinese / "text").rglob("*.html")):
        name = page.relative_to(chinese)
        if not (english / name).exists():
            continue
        originals = paragraphs((english / name).read_text(encoding="utf-8"))
        for key, text in paragraphs(page.read_text(encoding="utf-8")).items():
            if _is_translated(text, originals.get(key, "")):
                yield PagePair(f"help/{name}", Pair(text, originals[key]))


def _interface_pairs(root: Path) -> Iterator[PagePair]:
    for file in sorted(root.rglob("zh_CN/LC_MESSAGES/*.mo")):
        for key, value in read_catalogue(file.read_bytes()).items():
            context, _, original = key.rpartition("\x04")
            # A plural form: the singular is the first, and Chinese has one form.
            original = clean_interface_text(original.split("\0")[0])
            text = clean_interface_text(value.split("\0")[0])
            if context and _is_translated(text, original):
                # dialog|widget, or the name of a single message
                yield PagePair(f"ui/{file.stem}/{context.split('|')[0]}", Pair(text, original))


def _is_translated(text: str, original: str) -> bool:
    return (
        bool(_CHINESE.search(text))
        and not _CHINESE.search(original)
        and any(letter.isalpha() for letter in original)
    )


def _message(data: bytes, at: int) -> str:
    length, offset = struct.unpack_from("<2I", data, at)
    return data[offset : offset + length].decode("utf-8")


def _packages(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if not list(folder.glob(f"{package}_*.deb")):
            _run(["apt-get", "download", package], folder)
    return [sorted(folder.glob(f"{package}_*.deb"))[-1] for package in PACKAGES]


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT)
    if run.returncode != 0:
        raise DataError(f"{' '.join(command)} failed: {run.stderr.strip()[-500:]}")
