"""The site of the documentation, as far as it can be seen without mkdocs."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import paddle_recompute
from paddle_recompute import GradCache, static_graph
from tests.docs.pages import ENGLISH, MADE_BY_A_BENCHMARK, Page
from tests.ranks import ROOT


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return script("build")


@pytest.fixture(scope="module")
def staged(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs_src")
    build.stage(folder)
    return folder


def pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav if isinstance(nav, list) else list(nav.values())
    return [page for entry in entries for page in pages_of(entry)]


def test_every_page_is_in_the_navigation_in_both_languages() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    shown = {name: pages_of(entry[name]) for entry in nav for name in entry}
    others = {
        *MADE_BY_A_BENCHMARK,
        "CHANGELOG.md",
        "CHANGELOG_0.1.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    }
    english = [page for page in shown["English"] if page not in others]
    assert sorted(english) == sorted(page.path for page in ENGLISH)
    assert shown["中文"] == [Page(path).translation.path for path in english]


def test_the_staged_pages_link_to_staged_files(staged: Path) -> None:
    names = [str(page.relative_to(staged)) for page in staged.rglob("*.md")]
    assert {"README.md", "docs/README_cn.md", "examples/clip.py.md"} <= set(names)
    assert "fleet_configs/README.md" in names
    for name in names:
        page = (staged / name).read_text(encoding="utf-8")
        prose = re.sub(r"^(`{3,4})\w+\n.*?^\1$", "", page, flags=re.MULTILINE | re.DOTALL)
        links = [link for link in re.findall(r"\]\(([^)#]+)", prose) if "://" not in link]
        assert [link for link in links if not (staged / name).parent.joinpath(link).is_file()] == []


def test_the_reference_has_every_public_name_under_its_module(build: ModuleType) -> None:
    rooms = build.public_names()
    names = [name for room, names in rooms.items() for name in names if "static" not in room]
    modules = ["errors", "static_graph", "__version__"]
    assert sorted([*names, *modules]) == sorted(paddle_recompute.__all__)
    assert rooms["paddle_recompute.static_graph"] == static_graph.__all__
    text = "\n".join(build.reference().values())
    for room, names in rooms.items():
        assert all(f"::: {room}.{name}\n" in text for name in names)


def test_what_a_browser_would_fetch_is_found(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="https://a.org">a</a><script src="https://b.org/x.js"></script>'
        "<link rel=stylesheet href=//c.org/y.css><style>@import 'https://d.org/z'</style>",
        encoding="utf-8",
    )
    (tmp_path / "b.css").write_text("a{background:url(https://e.org/f.png)}", encoding="utf-8")
    found = "".join(build.loads_from_elsewhere(tmp_path))
    assert [host for host in "abcde" if f"{host}.org" in found] == list("bcde")


def test_help_of_the_gradient_cache_begins_with_an_example_that_runs() -> None:
    text = GradCache.__doc__ or ""
    assert text.split("\n\n")[1].startswith("    Examples:\n")
    example = doctest.DocTestParser().get_doctest(text, {}, "GradCache", None, 0)
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_citation_names_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    assert citation["version"] == paddle_recompute.__version__


# ------------------------------------------------------------------------------------ pictures

DRAWN = script("pictures").drawn()


def test_the_pictures_are_those_that_the_script_draws() -> None:
    files = {file.name: file.read_text("utf-8") for file in (ROOT / "docs/pictures").iterdir()}
    assert files == DRAWN
    assert max(map(len, files.values())) < 30_000
    shown = {Path(link).name for page in ENGLISH for link in page.links if link.endswith(".svg")}
    assert shown == {name for name in files if "_cn" not in name}


@pytest.mark.parametrize("name", DRAWN)
def test_the_words_of_a_picture_are_inside_of_it(name: str) -> None:
    """By a width of 13 pixels for a Chinese character and of 7.6 for another one."""
    right = float(re.findall(r'viewBox="0 0 (\d+)', DRAWN[name])[0])
    texts = re.findall(r'<text x="([\d.]+)".*?anchor="(\w+)".*?>(.*?)</text>', DRAWN[name])
    assert len(texts) > 5
    for x, anchor, words in texts:
        width = sum(13 if one > "\u2fff" else 7.6 for one in words)
        left = float(x) - {"start": 0, "middle": 0.5, "end": 1}[anchor] * width
        assert (left >= 0, left + width <= right) == (True, True), words
