"""Rooms and floors: who may import whom. The table stands in CONTRIBUTING.md, and nowhere else."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.ranks import ROOT

PACKAGE = "paddle_recompute"
APPLICATION = "app"
"""The folder of the application; everything else is the library."""
FORBIDDEN = {"pydantic", "yaml", "click", "tqdm", "tokenizers", "bokeh", "jinja2"}
"""What the library does not import: the dependencies of the application."""
OPEN_ROOMS = {"_paddle"}
"""Rooms whose modules are imported directly."""
FOR_ALL = {"errors"}
"""On the lowest floor too, there are errors to raise."""
MOST_LOOSE_MODULES = 8
MOST_FOLDERS = 17


def floors() -> dict[str, int]:
    """The floor of each room, as CONTRIBUTING.md declares it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, flags=re.MULTILINE)
    return {
        room.rstrip("/").replace("/", "."): int(floor)
        for floor, rooms in rows
        for room in re.findall(r"`([\w/]+)`", rooms)
    }


def modules(root: Path) -> dict[str, Path]:
    """The file of every module of the package below `root`, by its dotted name."""
    found = {}
    for path in (root / PACKAGE).rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every module of ours that `path` imports, inside functions too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            if node.module and node.module.split(".")[0] == PACKAGE:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    is_name = node.module in known and _binds(known[node.module], alias.name)
                    yield node.lineno, node.module if is_name or inner not in known else inner


def _binds(path: Path, name: str) -> bool:
    """Whether the module at `path` gives `name` a meaning of its own, besides a submodule."""
    body = tree_of(path).body
    for node in [*body, *(inner for one in body if isinstance(one, ast.If) for inner in one.body)]:
        if isinstance(node, ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            return True
        if getattr(node, "name", None) == name:
            return True
    return False


def room_of(module: str) -> str:
    """``recompute``, ``app.trainer``; empty for the package, its ``__main__`` and ``app``."""
    names = module.split(".")[1:]
    if names[:1] == [APPLICATION]:
        return ".".join(names[:2]) if len(names) > 1 else ""
    return "" if names[:1] in ([], ["__main__"]) else names[0]


def breaches(root: Path) -> list[str]:
    """Every import that goes up, sideways, or past the ``__init__`` of another room."""
    known, floor_of = modules(root), floors()
    found = []
    for module, path in known.items():
        own = room_of(module)
        if not own:  # the package itself hands out names of every floor, when they are asked for
            continue
        for line, target in imported(path, known):
            room = room_of(target)
            if room == own:
                continue
            where = f"{path.relative_to(root)}:{line} imports {target}"
            if target == PACKAGE:  # it hands out names of all rooms
                found.append(f"{where}: the root, from floor {floor_of[own]}")
            if not room:
                continue
            if room not in FOR_ALL and floor_of[room] >= floor_of[own]:
                found.append(f"{where}: floor {floor_of[room]}, from floor {floor_of[own]}")
            is_package = known[target].name == "__init__.py"
            is_loose = target == f"{PACKAGE}.{room}"
            if room not in OPEN_ROOMS and not (is_package or is_loose):
                found.append(f"{where}: past the __init__ of {room}")
    return found


def forbidden_imports(root: Path) -> list[str]:
    """Every import of a package of `FORBIDDEN` in the library, inside functions too."""
    found = []
    for module, path in modules(root).items():
        if f"{module}.".startswith(f"{PACKAGE}.{APPLICATION}."):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                if name.split(".")[0] in FORBIDDEN:
                    found.append(f"{path.relative_to(root)}:{node.lineno} imports {name}")
    return found


def circle(root: Path) -> list[str]:
    """Modules that import each other in a circle, inside functions or for a type checker too."""
    known = modules(root)
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        graph[module] = {
            f"{node.module}.{alias.name}"
            if f"{node.module}.{alias.name}" in known
            else str(node.module)
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        graph[module] -= {module, PACKAGE}
    graph.pop(PACKAGE, None)  # it hands out names of every room, when they are asked for
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_the_table_and_the_folders_name_the_same_rooms() -> None:
    rooms = {room_of(module) for module in modules(ROOT)} - {""}
    assert rooms == floors().keys()


def test_the_whole_library_lies_below_the_application() -> None:
    lowest = min(floor for room, floor in floors().items() if room.startswith(APPLICATION))
    library = {room: floor for room, floor in floors().items() if not room.startswith(APPLICATION)}
    assert max(library.values()) < lowest


def test_few_folders_and_few_loose_modules() -> None:
    folders = [path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")]
    assert len(folders) <= MOST_FOLDERS, folders
    loose = {path.stem for path in (ROOT / PACKAGE).glob("*.py")} - {"__init__", "__main__"}
    assert len(loose) <= MOST_LOOSE_MODULES, loose


def test_every_room_says_its_idea() -> None:
    for module, path in modules(ROOT).items():
        assert ast.get_docstring(tree_of(path)), module


@pytest.mark.parametrize("find", [breaches, circle, forbidden_imports])
def test_every_import_is_allowed(find: Callable[[Path], list[str]]) -> None:
    assert not find(ROOT)


INSIDE = "def f():\n    from "


@pytest.mark.parametrize(
    ("find", "files", "told"),
    [
        (
            breaches,
            {"recompute/a": f"{INSIDE}paddle_recompute.app.trainer import Trainer"},
            "recompute/a.py:2 imports paddle_recompute.app.trainer: floor 11, from floor 2",
        ),
        (
            breaches,
            {"recompute/a": "import paddle_recompute.grad_sync"},
            "recompute/a.py:1 imports paddle_recompute.grad_sync: floor 2, from floor 2",
        ),
        (
            breaches,
            {"recompute/a": "from paddle_recompute import __version__"},
            "recompute/a.py:1 imports paddle_recompute: the root, from floor 2",
        ),
        (
            breaches,
            {
                "recompute/a": "from paddle_recompute.captured_state.b import C",
                "captured_state/b": "class C: ...",
            },
            "imports paddle_recompute.captured_state.b: past the __init__ of captured_state",
        ),
        (
            forbidden_imports,
            {"grad_sync/a": "import yaml", "app/trainer/a": "import yaml"},
            "grad_sync/a.py:1 imports yaml",
        ),
        (
            forbidden_imports,
            {"grad_sync/a": f"{INSIDE}bokeh import plotting"},
            "grad_sync/a.py:2 imports bokeh",
        ),
        (
            circle,
            {
                "captured_state/a": f"{INSIDE}paddle_recompute.captured_state import b",
                "captured_state/b": f"{INSIDE}paddle_recompute.captured_state import a",
            },
            "paddle_recompute.captured_state.a",
        ),
    ],
)
def test_what_is_planted_is_found(
    find: Callable[[Path], list[str]], files: dict[str, str], told: str, tmp_path: Path
) -> None:
    for room in ("app/trainer", "grad_sync", "recompute", "captured_state"):
        (tmp_path / PACKAGE / room).mkdir(parents=True)
        (tmp_path / PACKAGE / room / "__init__.py").touch()
    for name, code in files.items():
        (tmp_path / PACKAGE / f"{name}.py").write_text(f"{code}\n", encoding="utf-8")
    found = find(tmp_path)
    assert any(one.endswith(told) for one in found), found
    assert len(found) == 1 or find is circle
