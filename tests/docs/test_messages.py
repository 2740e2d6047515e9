"""Each message that the page of errors explains is one that the library can say."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.ranks import ROOT

PAGES = ["troubleshooting.md", "troubleshooting_cn.md"]


@functools.cache
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


@pytest.mark.parametrize("page", PAGES)
def test_messages_exist(page: str) -> None:
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    messages = [found[1] for line in lines if (found := re.match(r"\| `([^`]+)` \|", line))]
    assert len(messages) > 15
    unknown = [one for one in messages if not any(one in text for text in texts())]
    assert not unknown


def test_both_languages_have_the_same_messages() -> None:
    first, second = (
        re.findall(r"^\| (`[^`]+`) \|", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE)
        for page in PAGES
    )
    assert first == second
