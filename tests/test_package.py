"""The package as a whole: its public names, what an import costs, what is said without Paddle."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import paddle_recompute
from paddle_recompute import _installed, errors
from paddle_recompute.errors import DependencyError
from tests import sampled
from tests.processes import python
from tests.ranks import ROOT


def test_an_import_is_free_and_a_configuration_needs_no_paddle() -> None:
    code = """
import os, sys
before = dict(os.environ)
import paddle_recompute
heavy = {"paddle", "numpy", "bokeh", "tokenizers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from paddle_recompute.app import cli
paddle_recompute.load_config("fleet_configs/contrastive_ernie-tiny_2cpu.yaml")
assert "paddle" not in sys.modules
assert os.environ == before
"""
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("", "")


def test_type_checkers_find_the_types_of_an_editable_install() -> None:
    """They follow a plain path in a .pth file, not a hook, to a package with py.typed (PEP 561)."""
    installed = Path(sysconfig.get_path("purelib"))
    lines = [line for file in installed.glob("*.pth") for line in file.read_text().splitlines()]
    if not (installed / "paddle_recompute").exists():
        assert any(Path(line, "paddle_recompute", "py.typed").is_file() for line in lines), lines


def test_every_public_name_is_there() -> None:
    for name in paddle_recompute.__all__:
        assert getattr(paddle_recompute, name) is not None
        assert name in dir(paddle_recompute)


def test_what_type_checkers_see_is_what_is_imported() -> None:
    """The names are written three times: for checkers, for ``import *``, for `__getattr__`."""
    tree = ast.parse(inspect.getsource(paddle_recompute))
    checked = next(
        node for node in tree.body if isinstance(node, ast.If) and "TYPE" in ast.dump(node.test)
    )
    seen = {
        alias.name: node.module.removeprefix("paddle_recompute").lstrip(".")
        for node in checked.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    homes = paddle_recompute._WITHOUT_PADDLE | paddle_recompute._WITH_PADDLE
    assert seen == {**homes, "errors": "", "static_graph": ""}
    assert sorted([*seen, "__version__"]) == sorted(paddle_recompute.__all__)


def test_recompute_is_the_function_whatever_was_imported_before() -> None:
    package = importlib.import_module("paddle_recompute.recompute")
    for _ in range(2):
        assert inspect.isfunction(paddle_recompute.recompute)
        # What Python does when it imports the sub-package for the first time.
        vars(paddle_recompute).pop("recompute")
        paddle_recompute.recompute = package
    assert sys.modules["paddle_recompute.recompute"] is package
    assert package.recompute is paddle_recompute.recompute


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'recompte'"):
        _ = paddle_recompute.recompte


def test_a_missing_paddle_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    vars(paddle_recompute).pop("TrainStep", None)
    with pytest.raises(
        DependencyError, match=r"not installed; for a CPU: pip install .paddlepaddle>=2\.6\.2"
    ):
        _ = paddle_recompute.TrainStep
    with pytest.raises(ImportError):  # so that `try: ... except ImportError` keeps working
        _ = paddle_recompute.TrainStep


def test_old_paddles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer ones and development builds are taken; the version is read without an import."""
    import paddle

    assert _installed._installed_version() == paddle.__version__
    for version in ("2.6.2.post120", "3.0.0-beta1", "0.0.0", ""):
        monkeypatch.setattr(_installed, "_installed_version", lambda version=version: version)
        _installed.require_paddle()
    for version in ("2.6.1", "2.4.2.post117"):
        monkeypatch.setattr(_installed, "_installed_version", lambda version=version: version)
        with pytest.raises(DependencyError, match=f"PaddlePaddle {version} is too old; for a CPU"):
            _installed.require_paddle()


def test_the_version_stands_in_one_place() -> None:
    try:
        installed = importlib.metadata.version("paddle-recompute")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is on the path, not installed")
    assert installed == paddle_recompute.__version__


def test_the_tables_that_are_sampled_are_there() -> None:
    left_out = {*sampled.LEFT_OUT_ON_26, *sampled.LEFT_OUT_ON_DEVICE}
    for name in {*sampled.EVERY, *sampled.EVERY_ON_26, *sampled.EVERY_ON_DEVICE, *left_out}:
        file, _, function = name.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"\ndef {function}(" in text or f"\n{function} = each_on_ranks(" in text, name


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["PYTHON=/nowhere/python"], "at PYTHON=/nowhere/python"), ([], "on the PATH")],
)
def test_make_says_in_one_line_that_it_finds_no_python(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    """A name on the PATH is not enough: version managers leave shims that fail when run."""
    for name in ("Makefile", "setup.py", "requirements", "paddle_recompute"):
        (tmp_path / name).symlink_to(ROOT / name)
    shims = tmp_path / "shims"
    shims.mkdir()
    for name in ("python3.12", "python3.11", "python3.10", "python3", "python"):
        (shims / name).write_text("#!/bin/sh\necho 'command not found' >&2; exit 127\n")
        (shims / name).chmod(0o755)
    done = subprocess.run(
        ["make", "venv", *arguments],
        cwd=tmp_path,
        env={"PATH": f"{shims}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    first, *rest = done.stderr.strip().splitlines()
    assert first.startswith("No Python 3.10, 3.11 or 3.12") and words in first
    assert all(line.startswith("make: ***") for line in rest)
    assert not (tmp_path / ".venv").exists()


def test_the_first_sentence_of_an_error_in_translated_code_is_that_of_the_operator() -> None:
    error = NotImplementedError(
        "In user code:\n    File 'a.py', line 1, in f\n      out = F.linear(\n"
        "    UnimplementedError: There are no kernels for matmul_v2.\n    [operator < f > error]"
    )
    assert errors.first_sentence(error).endswith("There are no kernels for matmul_v2.")
