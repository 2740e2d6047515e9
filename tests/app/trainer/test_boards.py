"""A board is given what ``metrics.jsonl`` has. The libraries are stand-ins."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from paddle_recompute import Trainer
from paddle_recompute.app.report import read_metrics
from paddle_recompute.app.trainer import boards
from paddle_recompute.errors import DependencyError
from tests.app.trainer.test_trainer import tiny


class Writer:
    """Of VisualDL and TensorBoard, and a run of W&B."""

    def __init__(self) -> None:
        self.figures: dict[tuple[int, str], float] = {}
        self.is_closed = False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.figures[step, name] = value

    def log(self, figures: dict[str, float], *, step: int) -> None:
        self.figures.update({(step, name): value for name, value in figures.items()})

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    finish = close


@pytest.mark.parametrize(
    ("board", "module", "name"),
    [
        ("visualdl", "visualdl", "LogWriter"),
        ("tensorboard", "tensorboard.summary", "Writer"),
        ("wandb", "wandb", "init"),
    ],
)
def test_a_board_has_the_figures_of_the_metrics(
    board: str, module: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, given = Writer(), dict[str, Any]()
    for installed in {board, module}:
        stand_in = ModuleType(installed)
        stand_in.__spec__ = ModuleSpec(installed, None)
        monkeypatch.setitem(sys.modules, installed, stand_in)

    def begin(*places: str, **settings: Any) -> Writer:
        given.update(settings, places=places)
        return writer

    monkeypatch.setattr(sys.modules[module], name, begin, raising=False)
    Trainer(tiny(folder, train__max_steps=3, train__log_to=[board])).run()
    assert str(folder / "run") in str(given)
    expected = {
        (record["step"], figure): value
        for record in read_metrics(folder / "run/metrics.jsonl")
        for figure, value in record.items()
        if figure != "step" and value is not None
    }
    assert writer.figures == expected and writer.is_closed
    assert (3, "loss") in expected


@pytest.mark.parametrize("name", boards.BOARDS)
def test_a_board_that_is_not_installed_is_refused_before_the_run(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda one, *a: None if one == name else found(one, *a)
    )
    with pytest.raises(DependencyError, match=rf"pip install 'paddle-recompute\[{name}\]'"):
        Trainer(tiny(folder, train__log_to=[name])).run()
    assert not (folder / "run").exists()
