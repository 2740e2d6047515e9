"""Runs of these tests measure no memory and write no report, unless a test asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_recompute.app.trainer import chunk_search, trainer
from tests.app.trainer.test_trainer import write_pairs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the pairs of `test_trainer.tiny`."""
    write_pairs(tmp_path / "pairs.tsv")
    return tmp_path


@pytest.fixture
def measured() -> None:
    """For a test of the memory of a step: measuring takes longer than the run, of a Program 5 s."""


@pytest.fixture
def report() -> None:
    """For a test of the report: a page takes 0.4 s, and the first one a second more."""


@pytest.fixture(autouse=True)
def _short_runs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "measured" not in request.fixturenames:
        monkeypatch.setattr(chunk_search, "measure_step", lambda *_: 1)
    if "report" not in request.fixturenames:
        monkeypatch.setattr(trainer, "write_report", lambda *_, **__: None)
