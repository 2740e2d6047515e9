"""What a reader finds in a page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

_VOID = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """The visible text of a page, its links, and whether each tag that opens is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.scripts = 0
        self._open: list[str] = []
        self._words: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert not self._open, self._open
        self.text = re.sub(r"\s+", " ", " ".join(self._words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        self.scripts += tag == "script"
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("script", "style"):
            self._words.append(data)
