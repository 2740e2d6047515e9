"""Both languages say the same, and every link leads somewhere."""

from __future__ import annotations

import re

import pytest

import paddle_recompute
from paddle_recompute import static_graph
from tests.docs.pages import ENGLISH, Page

each_page = pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.path)
NUMBER = re.compile(r"\d[\d.,]*\d|\d")


@each_page
def test_the_translation_has_the_same_code_sections_names_tables_and_figures(page: Page) -> None:
    assert page.translation.blocks() == page.blocks()
    assert len(page.blocks()) == page.text.count("\n```") / 2
    for (level, here), (other, there) in zip(page.sections, page.translation.sections, strict=True):
        assert other == level
        for pattern in ("`(.+?)`", r"\d+\.\d+"):
            assert set(re.findall(pattern, there)) == set(re.findall(pattern, here))
        counts = [sum(line.startswith("- ") for line in one.splitlines()) for one in (here, there)]
        assert counts[0] == counts[1]
    for table, translated in zip(page.tables(), page.translation.tables(), strict=True):
        assert len(table[0]) == len(translated[0])
        for row, other_row in zip(table, translated, strict=True):
            figures = [sorted(NUMBER.findall(" ".join(r.values()))) for r in (row, other_row)]
            assert figures[0] == figures[1]


@each_page
def test_every_link_leads_somewhere_and_the_translation_has_the_same(page: Page) -> None:
    for one in (page, page.translation):
        assert [link for link in one.links if not (one.file.parent / link).exists()] == []
    there = {link.replace("_cn.", ".") for link in page.translation.links}
    assert there == {link.replace("_cn.", ".") for link in page.links}


def test_every_page_is_in_the_index() -> None:
    index = Page("docs/README.md")
    assert {page.file.name for page in ENGLISH} <= {*index.links, "README.md"}


def test_the_tables_of_names_are_those_of_the_package() -> None:
    def names(page: Page, table: int) -> list[str]:
        return [
            name
            for row in page.tables()[table]
            for name in re.findall(r"`(\w+)`", next(iter(row.values())))
        ]

    public = names(Page("docs/README.md"), 2)
    assert sorted([*public, "__version__"]) == sorted(paddle_recompute.__all__)
    assert sorted(names(Page("docs/static_graph.md"), 0)) == sorted(static_graph.__all__)
