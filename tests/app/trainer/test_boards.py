"""What a board has of a run is what ``metrics.jsonl`` has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from paddle_recompute import Trainer
from paddle_recompute.app.report import read_metrics
from paddle_recompute.app.trainer import boards
from paddle_recompute.errors import DependencyError
from tests.app.trainer.test_trainer import tiny


def trained(folder: Path, board: str) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of each figure in ``metrics.jsonl``, by its name."""
    Trainer(tiny(folder, train__max_steps=3, train__log_to=[board])).run()
    records = read_metrics(folder / "run/metrics.jsonl")
    assert len(records) == 3
    return {
        name: [(one["step"], one[name]) for one in records if one[name] is not None]
        for name in ("loss", "lr", "grad_norm", "examples_per_second")
    }


def assert_has(found: list[tuple[int, float]], written: list[tuple[int, float]]) -> None:
    assert [step for step, _ in found] == [step for step, _ in written]
    assert [value for _, value in found] == pytest.approx([value for _, value in written])


def test_visualdl(folder: Path) -> None:
    visualdl = pytest.importorskip("visualdl")
    written = trained(folder, "visualdl")
    (log,) = (folder / "run/visualdl").glob("vdlrecords.*")
    reader = visualdl.LogReader(file_path=str(log))
    for name, values in written.items():
        found = reader.get_data("scalar", name)
        assert_has([(one.id, one.value) for one in found], values)


def test_tensorboard(folder: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.util import tensor_util

    written = trained(folder, "tensorboard")
    log = event_accumulator.EventAccumulator(str(folder / "run/tensorboard"))
    log.Reload()
    for name, values in written.items():
        found = log.Tensors(name)
        assert_has(
            [(one.step, tensor_util.make_ndarray(one.tensor_proto).item()) for one in found], values
        )


def test_wandb(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    written = trained(folder, "wandb")
    (log,) = (folder / "run/wandb").glob("offline-run-*/*.wandb")
    content = log.read_bytes()
    for name, values in written.items():
        assert name.encode() in content
        assert all(repr(value).encode() in content for _, value in values), name


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
