"""Runs of the trainer in these tests write no report, unless a test asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_recompute.app.trainer import memory_probe, trainer
from tests.app.trainer.test_trainer import write_pairs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the pairs of `test_trainer.tiny`."""
    write_pairs(tmp_path / "pairs.tsv")
    return tmp_path


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not what a test is about; of a Program, a measured step takes a second."""
    monkeypatch.setattr(memory_probe, "measure_step", lambda *arguments, **options: 1)


@pytest.fixture
def report() -> None:
    """For a test that looks at the report."""


@pytest.fixture(autouse=True)
def _no_report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page takes 0.4 s, a third of a run, and the first one a second more."""
    if "report" not in request.fixturenames:
        monkeypatch.setattr(trainer, "write_report", lambda *_, **__: None)
