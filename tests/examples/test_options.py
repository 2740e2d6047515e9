"""The script of each option of a step learns. They run in this process, or in its pooled ranks."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from unittest import mock

import pytest

from paddle_recompute.errors import ConfigError
from tests.bfloat16 import needs_bfloat16
from tests.ranks import ROOT, run_ranks
from tests.train_step.half_precision import pretended_gpu

SCRIPTS = (
    "accumulation",
    "compiled_graph",
    "data_parallel",
    "lamb_lars",
    "mixed_precision",
    "recompute",
)


def run(script: str, *arguments: str) -> str:
    """What it prints."""
    shown = io.StringIO()
    path = str(ROOT / "examples" / f"{script}.py")
    with (
        mock.patch.object(sys, "argv", [path, "--steps", "5", *arguments]),
        contextlib.redirect_stdout(shown),
    ):
        runpy.run_path(path, run_name="__main__")
    return shown.getvalue()


def check_losses(shown: str) -> None:
    losses = [float(one) for one in re.findall(r"^step \d+  loss (\S+)", shown, re.MULTILINE)]
    assert len(losses) == 5, shown
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("accumulation", ()),
        ("compiled_graph", ()),
        ("lamb_lars", ()),
        ("lamb_lars", ("--optimizer", "lars")),
        pytest.param("mixed_precision", ("--static",), marks=needs_bfloat16),
        ("recompute", ()),
    ],
)
def test_it_learns(script: str, arguments: tuple[str, ...]) -> None:
    shown = run(script, *arguments)
    check_losses(shown)
    if script == "recompute":
        assert "the losses of the plain model: equal" in shown
    if script == "compiled_graph":
        assert "compiled: one Program" in shown


def test_mixed_precision_in_dygraph() -> None:
    with pytest.raises(ConfigError, match="silently compute in float32"):
        run("mixed_precision")
    with pretended_gpu():
        shown = run("mixed_precision")
    check_losses(shown)
    assert "loss scale 32768" in shown


def data_parallel() -> list[str]:
    return [run("data_parallel", "--sync", mode) for mode in ("overlap", "fused")]


def test_data_parallel_learns_on_two_ranks() -> None:
    (overlap, fused), others = run_ranks(data_parallel, 2)
    check_losses(overlap)
    assert fused == overlap
    assert others == ["", ""]


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_is_short_enough_to_copy(script: str) -> None:
    path = ROOT / "examples" / f"{script}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80
