"""The documentation as the tests read it: the README and the pages in docs/, in two languages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.ranks import ROOT

MADE_BY_A_BENCHMARK = {"docs/recompute_cases.md"}

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#+ .+)$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)]+)\)")


@dataclass(frozen=True)
class Page:
    """One Markdown file; `path` is relative to the repository."""

    path: str

    @property
    def file(self) -> Path:
        return ROOT / self.path

    @property
    def text(self) -> str:
        return self.file.read_text(encoding="utf-8")

    @property
    def translation(self) -> Page:
        return Page(self.path.replace(".md", "_cn.md"))

    @property
    def prose(self) -> str:
        """The text without code blocks."""
        return _BLOCK.sub("", self.text)

    @property
    def links(self) -> list[str]:
        """Relative links, without anchors."""
        links = [link.partition("#")[0] for link in _LINK.findall(self.prose)]
        return [link for link in links if link and "://" not in link]

    @property
    def sections(self) -> list[tuple[int, str]]:
        """Level and text of every section, code blocks left out."""
        _, *parts = _HEADING.split(self.prose)
        return [
            (len(heading.split()[0]), body)
            for heading, body in zip(parts[::2], parts[1::2], strict=True)
        ]

    def blocks(self, language: str = "") -> list[str]:
        """The code blocks of that language, or all of them."""
        return [code for name, code in self.code() if language in ("", name)]

    def code(self) -> list[tuple[str, str]]:
        """Language and text of every code block."""
        return _BLOCK.findall(self.text)

    def tables(self) -> list[list[dict[str, str]]]:
        return tables_of(self.prose)

    def record(self, name: str) -> str:
        """The text of the benchmark record of that name to which the page links."""
        (link,) = {
            link for link in self.links if re.search(rf"results/{name}_2\w+\S*331\S*\.md$", link)
        }
        return (self.file.parent / link).read_text(encoding="utf-8")


def tables_of(text: str) -> list[list[dict[str, str]]]:
    """Every table, a dict per row."""
    tables = []
    for lines in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        header, _, *rows = [
            [cell.strip() for cell in line.strip().strip("|").split("|")]
            for line in lines.splitlines()
        ]
        tables.append([dict(zip(header, row, strict=True)) for row in rows])
    return tables


def english_pages() -> list[Page]:
    paths = ["README.md", *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))]
    return [
        Page(path)
        for path in paths
        if not path.endswith("_cn.md") and path not in MADE_BY_A_BENCHMARK
    ]


ENGLISH = english_pages()


def all_blocks(language: str) -> list[tuple[Page, str]]:
    return [(page, code) for page in ENGLISH for code in page.blocks(language)]
