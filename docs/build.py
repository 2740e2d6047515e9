"""Build the site of the documentation: `make docs`.

`stage` copies the pages and all that they link to into build/docs_src, in the folders of the
repository, so that a link leads to the same thing here and there. A folder and a file of code
become pages. `reference` adds a page for each room with public names; mkdocstrings fills it from
the docstrings, without importing the package. A broken link ends the build.
"""

from __future__ import annotations

import ast
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "docs_src"
PACKAGE = ROOT / "paddle_recompute"

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)")
# Two brackets in a sentence, as of an error that is quoted: not a reference to a name.
_BRACKETS = re.compile(r"^[^`\n]*\]\[[^`\n]*$", re.MULTILINE)
_CODE = {".py": "python", ".yaml": "yaml", ".txt": "text", ".json": "json", "": "text"}
_LISTED = {".md", ".py", ".yaml"}

# ---------------------------------------------------------------------------------- the pages


def stage(target: Path) -> None:
    """Write the pages of the site, and whatever they link to, below `target`."""
    waiting = ["README.md", "README_cn.md", "CONTRIBUTING.md", "SECURITY.md"]
    kinds = (".md", ".js", ".css")
    waiting += [f"docs/{one.name}" for one in (ROOT / "docs").iterdir() if one.suffix in kinds]
    done = set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        if (text := _page(path)) is None:
            _write(target / path, (ROOT / path).read_bytes())
            continue
        folder = PurePosixPath(path if (ROOT / path).is_dir() else PurePosixPath(path).parent)
        waiting += [found for link in _links(text) if (found := _in_repository(folder, link))]
        _write(target / _name_of_page(path), _with_site_links(text, folder).encode())


def _page(path: str) -> str | None:
    """The Markdown that stands for this file or folder; None for a file that is copied."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(one.name for one in file.iterdir() if one.suffix in _LISTED)
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    if file.suffix == ".md":
        return file.read_text(encoding="utf-8")
    if file.suffix not in _CODE:
        return None
    code = file.read_text(encoding="utf-8")
    return f"# {path}\n\n````{_CODE[file.suffix]}\n{code}````\n"


def _name_of_page(path: str) -> str:
    """Where the page of that file or folder is in the site."""
    file = ROOT / path
    if file.is_dir():
        return f"{path}/README.md"
    return f"{path}.md" if file.suffix in _CODE else path


def _in_repository(folder: PurePosixPath, link: str) -> str | None:
    """The path of what a link in that folder leads to, if it is in the repository."""
    if "://" in link:
        return None
    path = normpath(folder / link)
    return path if not path.startswith("..") and (ROOT / path).exists() else None


def _links(text: str) -> Iterator[str]:
    for part in _FENCED.split(text)[::2]:
        yield from _LINK.findall(part)


def _with_site_links(text: str, folder: PurePosixPath) -> str:
    def in_site(found: re.Match[str]) -> str:
        path = _in_repository(folder, found[1])
        return found[1] + _name_of_page(path).removeprefix(path) if path else found[1]

    parts = _FENCED.split(text)
    for index in range(0, len(parts), 2):
        text = _LINK.sub(in_site, parts[index])
        parts[index] = _BRACKETS.sub(lambda line: line[0].replace("][", "]\\["), text)
    return "".join(parts)


def _write(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


# ---------------------------------------------------------------------------------- the reference


def public_names() -> dict[str, list[str]]:
    """The public names of the package, under the module from which they are imported."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and "TYPE" in ast.dump(node.test)
    )
    rooms: dict[str, list[str]] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        for one in node.names:
            room = f"{node.module}.{one.name}" if node.module == "paddle_recompute" else node.module
            rooms[room] = rooms.get(room, []) + ([] if room != node.module else [one.name])
    rooms["paddle_recompute.static_graph"] = _static_names()
    return rooms


def _static_names() -> list[str]:
    tree = ast.parse((PACKAGE / "static_graph" / "__init__.py").read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return list(names)


def reference() -> dict[str, str]:
    """The Markdown of each page of the API reference, by its name in the site."""
    pages = {}
    for room, names in sorted(public_names().items()):
        short = room.removeprefix("paddle_recompute.").removeprefix("app.")
        source = room if room.endswith("static_graph") else "paddle_recompute"
        use = f"```python\nfrom {source} import {', '.join(names or [short])}\n```\n"
        body = "\n".join(f"::: {room}.{name}\n" for name in names) or f"::: {room}\n"
        pages[f"reference/{short}.md"] = f"# {short}\n\n{use}\n{body}"
    return pages


# ---------------------------------------------------------------------------------- the site


def build() -> Path:
    """Make the site, and return its folder."""
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config
    from pymdownx.slugs import slugify

    shutil.rmtree(SOURCE, ignore_errors=True)
    stage(SOURCE)
    for name, text in reference().items():
        _write(SOURCE / name, text.encode())
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True)
    # The anchors that the repository's web view gives, also to Chinese headings.
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    for entry in config.nav:
        if entry.get("API") == "reference":
            entry["API"] = [{PurePosixPath(name).stem: name} for name in reference()]
    build_site(config)
    site = Path(config.site_dir)
    for page in site.rglob("*_cn.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace('<html lang="en"', '<html lang="zh"', 1), encoding="utf-8")
    return site


def loads_from_elsewhere(site: Path) -> list[str]:
    """What a browser would fetch from a network to show the site."""
    outside = r"""["'(]?((?:https?:)?//[^"')\s>]+)"""
    in_page = re.compile(rf"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)={outside}")
    in_style = re.compile(rf"(?:url\(|@import ){outside}")
    return [
        f"{file.relative_to(site)}: {found}"
        for pattern, suffix in ((in_page, "html"), (in_style, "css"), (in_style, "html"))
        for file in sorted(site.rglob(f"*.{suffix}"))
        for found in pattern.findall(file.read_text(encoding="utf-8"))
    ]


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("jieba").setLevel(logging.WARNING)
    made = build()
    if elsewhere := loads_from_elsewhere(made):
        sys.exit("the site needs a network:\n" + "\n".join(elsewhere))
    print(f"open {(made / 'index.html').relative_to(ROOT)}")
