"""The figures in the documentation are those of the benchmark records beside them.

Measured anew? Then put the new figures into both languages.
"""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ENGLISH, Page

NUMBER = re.compile(r"\d[\d.,]*\d|\d")
VERSIONS = {"2.6", "2.6.2", "3.3", "3.3.1", "3.10", "3.11", "3.12", "2.0", "4.0"}


def records_of(page: Page, links: list[str]) -> str:
    files = [page.file.parent / link for link in links if link.endswith(".md")]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def rounded(records: str, decimals: int) -> set[str]:
    """Fractions of `records` with one digit less than they have, and numbers of bytes in MB."""
    fractions = re.findall(rf"\d+\.\d{{{decimals + 1}}}(?!\d)", records)
    counts = [int(one.replace(",", "")) / 1e6 for one in re.findall(r"\d+(?:,\d{3}){2,}", records)]
    return {f"{float(one):.{decimals}f}" for one in [*fractions, *counts]}


def test_results_on_the_first_page() -> None:
    page = Page("README.md")
    (table,) = (one for one in page.tables() if "record" in one[0])
    for row in table:
        recorded = NUMBER.findall(records_of(page, re.findall(r"\]\((.+?)\)", row["record"])))
        own = re.sub(r"`.+?`", "", row["result"])
        assert {*NUMBER.findall(own)} <= {*recorded}, row


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.path)
def test_figures_stand_in_a_record_of_the_page(page: Page) -> None:
    text = re.sub(r"`.+?`|\[[^\]]*\]\([^)]*\)", "", page.prose)
    figures = {*re.findall(r"\d+\.\d[\d.]*\d|\d+\.\d", text)} - VERSIONS
    records = records_of(page, [link for link in page.links if "results/" in link])
    for figure in figures:
        decimals = len(figure.partition(".")[2])
        assert figure in records or figure in rounded(records, decimals), figure
