"""What the library replaces in Paddle is in the table of docs/limits.md, and nothing else is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import paddle
import pytest

from paddle_recompute._paddle import counting, writes
from tests.docs.pages import Page
from tests.ranks import ROOT

PACKAGE = ROOT / "paddle_recompute"
OF_OTHERS = ("paddle", "sys", "logging")
CLASSES = (paddle.Tensor, paddle.nn.Layer, paddle.optimizer.Optimizer)
BY_SETATTR = {
    "counting.py": {name for _, name in counting.COUNTERS},
    "fleet_recompute.py": {"recompute", "recompute_sequential"},
    "guarded.py": set(),  # attributes of a class of ours
    "writes.py": {name for _, name in writes._UNCOUNTED_WRITES},
}
"""The modules of `_paddle` that call ``setattr``, and what they set."""
OF_OURS = {"buffers", "rows", "scale", "argv"}
"""Attributes of objects of ours that have the name of a method; what a script finds in ``sys``."""


def roots(tree: ast.Module) -> set[str]:
    """The names of `tree` for modules of others, for what is imported from them, and aliases."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.split(".")[0] for a in node.names if is_of_others(a.name)}
        elif isinstance(node, ast.ImportFrom) and is_of_others(node.module or ""):
            found |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and root(node.value) in found:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def is_of_others(module: str) -> bool:
    return module.split(".")[0] in OF_OTHERS


def root(node: ast.expr) -> str | None:
    """``a`` of ``a``, ``a.b``, ``a.b.c``; None of all else, as of ``a().b``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def full_name(owner: ast.expr, name: str) -> str:
    """`name`; with its owner, if many have one of that name, as ``layer.__call__``."""
    of = ast.unparse(owner).rpartition(".")[2].lower()
    return f"{of}.{name}" if name.startswith("__") else name


def targets(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            for target in node.targets:
                yield from target.elts if isinstance(target, ast.Tuple) else [target]


def replaced_in(path: Path) -> Iterator[str]:
    """Attributes of modules and classes of others, and methods and classes of single objects."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = roots(tree)
    for target in targets(tree):
        match target:
            case ast.Attribute(value=owner, attr=name) if root(owner) not in ("self", "cls"):
                is_method = any(callable(getattr(one, name, None)) for one in CLASSES)
                if (is_method or root(owner) in known) and name not in OF_OURS:
                    yield name if name == "__class__" else full_name(owner, name)
            case ast.Subscript(ast.Attribute(attr="__dict__"), ast.Constant(str(name))):
                yield name
    if path.parent.name == "_paddle":
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        if any(isinstance(call, ast.Name) and call.id == "setattr" for call in calls):
            yield from BY_SETATTR[path.name]


@pytest.fixture(scope="module")
def replaced() -> dict[str, str]:
    """Each name, with a module that replaces it."""
    paths = [path for path in PACKAGE.rglob("*.py") if "app" not in path.parts]
    return {name: str(path) for path in paths for name in replaced_in(path)}


def test_the_page_lists_each_function_of_paddle_that_is_replaced(replaced: dict[str, str]) -> None:
    (table,) = (rows for rows in Page("docs/limits.md").tables() if "replaced" in rows[0])
    names = [name for row in table for name in re.findall(r"`([\w.]+)`", row["replaced"])]
    listed = {
        ".".join(name.lower().split(".")[-2:]) if ".__" in name else name.rpartition(".")[2]
        for name in names
    }
    assert {name: path for name, path in replaced.items() if name not in listed} == {}
    assert listed - set(replaced) == set()
