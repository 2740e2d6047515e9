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


def test_ratios_of_recompute() -> None:
    page = Page("docs/recompute.md")
    kept = ("peak / plain", "time / plain")
    recorded = first_table(page.record("recompute_cost"))
    shown = table_with(page, "peak / plain")
    assert [[row[name] for name in kept] for row in shown] == [
        [row[name] for name in kept] for row in recorded
    ]


def test_memory_of_large_batches() -> None:
    page = Page("docs/large_batches.md")
    shown = table_with(page, "peak, MiB")
    recorded = first_table(page.record("contrastive_memory"))
    assert shown == [{name: row[name] for name in shown[0]} for row in recorded]


def test_time_of_large_batches() -> None:
    page = Page("docs/large_batches.md")
    column = "time per pair / plain"
    recorded = {row["step"]: row[column] for row in first_table(page.record("contrastive_time"))}
    for row in table_with(page, column):
        assert row[column] == first_number(recorded[row["step"]])


def test_gain_of_large_batches() -> None:
    page = Page("docs/large_batches.md")
    record = page.record("batch_size_study")
    for row in table_with(page, "64 pairs"):
        of_data = record.partition(f"\n## {row['data']}\n")[2].partition("\n## ")[0]
        equal_examples = of_data.partition("\n### Equal examples\n")[2]
        for recorded in first_table(equal_examples):
            mean = float(first_number(recorded["MRR"]))
            assert abs(float(row[f"{recorded['batch']} pairs"]) - mean) <= 0.00051


def test_times_of_synchronization() -> None:
    page = Page("docs/gradient_synchronization.md")
    record = page.record("sync")
    for rate in ("100", "200", "1000"):
        of_rate = record.partition(f"\n## {rate} Mbit/s\n")[2].partition("\n## ")[0]
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
