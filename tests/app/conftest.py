"""Runs of these tests measure no memory and write no report, unless a test asks for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paddle_recompute.app.trainer import Trainer, chunk_search, trainer
from tests.app.trainer.test_trainer import tiny, write_pairs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the pairs of `test_trainer.tiny`."""
    write_pairs(tmp_path / "pairs.tsv")
    return tmp_path


@pytest.fixture(scope="session")
def _run_of_two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    write_pairs(folder / "pairs.tsv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_search, "measure_peak", lambda *_: 1)
        patch.setattr(trainer, "write_report", lambda *_, **__: None)
        Trainer(tiny(folder, train__max_steps=2)).run()
    return folder


@pytest.fixture
def finished(_run_of_two_steps: Path, tmp_path: Path) -> Path:
    """`folder` after a run of two steps: a copy of one run for all tests that begin with one."""
    shutil.copytree(_run_of_two_steps, tmp_path, dirs_exist_ok=True)
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
        monkeypatch.setattr(chunk_search, "measure_peak", lambda *_: 1)
    if "report" not in request.fixturenames:
        monkeypatch.setattr(trainer, "write_report", lambda *_, **__: None)
