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
def test_the_translation_has_the_same_code(page: Page) -> None:
    assert page.translation.blocks() == page.blocks()
    assert len(page.blocks()) == page.text.count("\n```") / 2


@each_page
def test_the_translation_has_the_same_sections_names_and_tables(page: Page) -> None:
    english, chinese = page.sections, page.translation.sections
    assert [level for level, _ in chinese] == [level for level, _ in english]
    for (_, here), (_, there) in zip(english, chinese, strict=True):
        assert sorted(set(re.findall("`(.+?)`", there))) == sorted(set(re.findall("`(.+?)`", here)))
        assert sum(line.startswith("- ") for line in there.splitlines()) == sum(
            line.startswith("- ") for line in here.splitlines()
        )
    shapes = [
        [(len(table), len(table[0])) for table in one.tables()] for one in (page, page.translation)
    ]
    assert shapes[0] == shapes[1]


@each_page
def test_the_translation_has_the_same_figures(page: Page) -> None:
    for table, translated in zip(page.tables(), page.translation.tables(), strict=True):
        for row, other in zip(table, translated, strict=True):
            figures = [sorted(NUMBER.findall(" ".join(one.values()))) for one in (row, other)]
            assert figures[0] == figures[1]
    for (_, here), (_, there) in zip(page.sections, page.translation.sections, strict=True):
        decimals = [sorted(set(re.findall(r"\d+\.\d+", text))) for text in (here, there)]
        assert decimals[0] == decimals[1]


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
