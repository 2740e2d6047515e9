"""Both languages say the same, every link leads somewhere, and what a page names exists."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import paddle_recompute
from paddle_recompute import static_graph
from tests.docs.pages import ENGLISH, Page
from tests.ranks import ROOT

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


# ------------------------------------------------------------------- messages of the page of errors


def texts() -> list[str]:
    """All strings of the package; what an f-string puts in is a line break."""
    found = []
    for path in (ROOT / "paddle_recompute").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(one.value) if isinstance(one, ast.Constant) else "\n" for one in node.values
                ]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_each_message_that_is_explained_is_one_that_the_library_can_say() -> None:
    pages = (Page("docs/troubleshooting.md"), Page("docs/troubleshooting_cn.md"))
    first, second = (re.findall(r"^\| `([^`]+)` \|", one.text, re.MULTILINE) for one in pages)
    assert first == second and len(first) > 15
    known = texts()
    assert [one for one in first if not any(one in text for text in known)] == []


# -------------------------------------------------------------- commands that a newcomer sees first

LINES_OF_A_SCREEN = 40


@pytest.mark.parametrize("name", ["README.md", "README_cn.md"])
def test_the_first_screen_names_commands_that_the_check_runs(name: str, tmp_path: Path) -> None:
    """What ``.ci/run`` gives to make, without running it."""
    screen = Page(name).text.splitlines()[:LINES_OF_A_SCREEN]
    named = {line for line in screen if re.fullmatch("make [a-z]+", line)}
    assert named == {"make train", "make test"}
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho make "$@" >> {tmp_path}/calls\n', encoding="utf-8")
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([tmp_path / ".ci/run"], env=environment, check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert named <= {" ".join(call.split()[:2]) for call in calls}
