"""The figures in the documentation are those of the benchmark records beside them.

Measured anew? Then put the new figures into both languages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ENGLISH, Page, tables_of

NUMBER = re.compile(r"\d[\d.,]*\d|\d")
VERSIONS = {"2.6", "2.6.2", "3.3", "3.3.1", "3.10", "3.11", "3.12", "2.0", "4.0"}


def first_number(cell: str) -> str:
    return cell.split()[0]


def section(record: str, title: str) -> str:
    return record.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_table(text: str) -> list[dict[str, str]]:
    return tables_of(text)[0]


def table_with(page: Page, column: str) -> list[dict[str, str]]:
    (table,) = (one for one in page.tables() if column in one[0])
    return table


def test_results_on_the_first_page() -> None:
    page = Page("README.md")
    for row in table_with(page, "record"):
        (link,) = re.findall(r"\]\((.+?)\)", row["record"])
        recorded = set(NUMBER.findall(Path(page.file.parent / link).read_text(encoding="utf-8")))
        own = re.sub(r"`.+?`", "", row["result"])
        assert [number for number in NUMBER.findall(own) if number not in recorded] == [], row


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.path)
def test_figures_in_sentences_stand_in_a_record_of_the_page(page: Page) -> None:
    text = re.sub(r"`.+?`|\[[^\]]*\]\([^)]*\)|^\|.*$", "", page.prose, flags=re.MULTILINE)
    figures = {*re.findall(r"\d+\.\d[\d.]*\d|\d+\.\d", text)} - VERSIONS
    records = "".join(
        (page.file.parent / link).read_text(encoding="utf-8")
        for link in page.links
        if "results/" in link and link.endswith(".md")
    )
    assert {one for one in figures if one not in records} == set()


MEMORY = ["peak, MiB", "step", "pairs", "peak / plain with 64"]


@pytest.mark.parametrize(
    ("path", "record", "key", "columns"),
    [
        ("docs/recompute.md", "recompute_cost", "", ["peak / plain", "time / plain"]),
        ("docs/large_batches.md", "contrastive_memory", "", MEMORY),
        ("docs/large_batches.md", "contrastive_time", "step", ["time per pair / plain"]),
    ],
)
def test_columns_of_a_record(path: str, record: str, key: str, columns: list[str]) -> None:
    """In rows of the same name, or in rows of the same order."""
    page = Page(path)
    recorded = first_table(page.record(record))
    shown = table_with(page, columns[0])
    rows = {row[key]: row for row in recorded} if key else dict(enumerate(recorded))
    for number, row in enumerate(shown):
        known = rows[row[key] if key else number]
        for column in columns:
            assert row[column] in (known[column], first_number(known[column])), row
    assert key or len(shown) == len(recorded)


def test_gain_of_large_batches() -> None:
    page = Page("docs/large_batches.md")
    for row in table_with(page, "64 pairs"):
        of_data = section(page.record("batch_size_study"), row["data"])
        equal_examples = of_data.partition("\n### Equal examples\n")[2]
        for recorded in first_table(equal_examples):
            mean = float(first_number(recorded["MRR"]))
            assert abs(float(row[f"{recorded['batch']} pairs"]) - mean) <= 0.00051


def test_times_of_synchronization() -> None:
    page = Page("docs/gradient_synchronization.md")
    for rate in ("100", "200", "1000"):
        of_rate = section(page.record("sync"), f"{rate} Mbit/s")
        medians = {row["way"]: first_number(row["seconds"]) for row in first_table(of_rate)}
        for row in table_with(page, "way"):
            assert row[f"{rate} Mbit/s"] == medians[row["way"].replace("`", "")], (rate, row)


def test_peaks_and_times_of_the_static_graph() -> None:
    page = Page("docs/static_graph.md")
    recorded = {row["variant"]: row for row in first_table(page.record("static_graph"))}
    for row in table_with(page, "peak, MB"):
        known = recorded[row["variant"]]
        (time,) = (name for name in known if name.startswith("time / plain"))
        assert row["peak, MB"] == f"{int(known['peak, bytes'].replace(',', '')) / 1e6:.1f}"
        assert row["time / plain static"] == first_number(known[time])
