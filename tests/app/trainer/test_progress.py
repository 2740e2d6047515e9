"""What is shown on a terminal and elsewhere, and what the metrics file holds."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import paddle
import pytest

from paddle_recompute import Trainer
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.report import append_record, read_metrics
from paddle_recompute.app.trainer import boards
from paddle_recompute.app.trainer.meter import Meter
from paddle_recompute.app.trainer.recorder import Progress, keep_until
from paddle_recompute.errors import DependencyError, OutputError
from tests.app.trainer.test_trainer import tiny

RECORD = {"step": 20, "loss": 1.25, "examples_per_second": 321.4, "peak_bytes": 3 * 2**20}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("enabled", [True, False], ids=["rank 0", "another rank"])
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_bar_on_a_terminal_and_plain_lines_elsewhere(
    kind: type[io.StringIO], enabled: bool
) -> None:
    stream = kind()
    progress = Progress(50, done=19, enabled=enabled, stream=stream)
    progress.advance()
    progress.show(RECORD)
    progress.close()
    shown = stream.getvalue()
    if not enabled:
        assert shown == ""
    elif kind is Terminal:
        for part in ("20/50", "loss=1.2500", "peak=3.0 MiB"):
            assert part in shown
    else:
        assert shown == "step 20/50  loss 1.2500  examples/s 321  peak 3.0 MiB\n"
        progress.show({**RECORD, "peak_bytes": None})
        assert stream.getvalue().endswith("peak not measured\n")


def test_the_metric_that_chooses_the_best_is_shown() -> None:
    valid = {"recall@1": 0.1, "recall@10": 0.2, "map": 0.3, "ndcg@10": 0.4, "mrr": 0.5}
    stream = io.StringIO()
    Progress(50, stream=stream, best_metric="map").show({**RECORD, "valid": valid})
    assert stream.getvalue().endswith("recall@1 0.1000  map 0.3000  mrr 0.5000\n")


def test_the_log_keeps_what_a_resumed_run_does_not_repeat_and_a_damaged_one_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (10, 20, 30):
        append_record(path, {**RECORD, "step": step})
    with path.open("a") as file:
        file.write('{"step": 3')  # a torn last line is left out
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()[:-1]] == [10, 20, 30]
    assert read_metrics(path)[1] == RECORD
    keep_until(20, path)
    assert [record["step"] for record in read_metrics(path)] == [10, 20]
    keep_until(0, path)  # a new run
    assert read_metrics(path) == []
    for damaged in ("{", "[]", '{"step": "x"}', "null", "[" * 10_000):
        path.write_text(f"{damaged}\n")
        with pytest.raises(OutputError, match=r"metrics\.jsonl: is damaged"):
            read_metrics(path)


def test_numbers_that_json_has_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        append_record(tmp_path / "metrics.jsonl", {"loss": float("nan")})


@pytest.mark.skipif(not _memory.can_reset_peak(), reason="needs the peak of a step alone")
def test_meter_sees_the_peak_of_steps_alone() -> None:
    meter = Meter()
    assert meter.rate(8) == 0.0
    meter.start()
    meter.stop()
    quiet = meter.peak_bytes
    assert quiet is not None
    paddle.zeros([1 << 20])  # 4 MiB between two steps, gone before the next one
    meter.start()
    meter.stop()
    assert meter.peak_bytes == quiet
    meter.start()
    paddle.zeros([1 << 20])
    meter.stop()
    assert meter.peak_bytes >= quiet + (4 << 20)
    assert meter.steps == 3 and meter.rate(8) == 24 / meter.seconds


# ------------------------------------------------------------------------------------------- boards


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


BEGUN_BY = {
    "visualdl": ("visualdl", "LogWriter"),
    "tensorboard": ("tensorboard.summary", "Writer"),
    "wandb": ("wandb", "init"),
}


def test_boards_have_the_figures_of_the_metrics(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: dict[str, tuple[Writer, str]] = {}
    for board, (module, name) in BEGUN_BY.items():
        for installed in {board, module}:
            stand_in = ModuleType(installed)
            stand_in.__spec__ = ModuleSpec(installed, None)
            monkeypatch.setitem(sys.modules, installed, stand_in)

        def begin(*places: str, board: str = board, **settings: Any) -> Writer:
            begun[board] = Writer(), f"{places} {settings}"
            return begun[board][0]

        monkeypatch.setattr(sys.modules[module], name, begin, raising=False)
    Trainer(tiny(folder, train__max_steps=3, train__log_to=[*BEGUN_BY])).run()
    expected = {
        (record["step"], figure): value
        for record in read_metrics(folder / "run/metrics.jsonl")
        for figure, value in record.items()
        if figure != "step" and value is not None
    }
    assert (3, "loss") in expected and begun.keys() == BEGUN_BY.keys()
    for writer, given in begun.values():
        assert str(folder / "run") in given
        assert writer.figures == expected and writer.is_closed


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
