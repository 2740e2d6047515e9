"""What is shown on a terminal and elsewhere, and what the metrics file holds."""

from __future__ import annotations

import io
import json
from pathlib import Path

import paddle
import pytest

from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.report import read_metrics
from paddle_recompute.app.trainer.loop import Meter
from paddle_recompute.app.trainer.recorder import MetricsLog, Progress

RECORD = {"step": 20, "loss": 1.25, "examples_per_second": 321.4, "peak_bytes": 3 * 2**20}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(50, stream=stream)
    progress.advance()
    progress.show(RECORD)
    progress.close()
    assert stream.getvalue() == "step 20/50  loss 1.2500  examples/s 321  peak 3.0 MiB\n"


def test_peak_that_is_not_measured() -> None:
    stream = io.StringIO()
    Progress(50, stream=stream).show({**RECORD, "peak_bytes": None})
    assert stream.getvalue().endswith("peak not measured\n")


def test_bar_on_a_terminal() -> None:
    stream = Terminal()
    progress = Progress(50, done=19, stream=stream)
    progress.advance()
    progress.show(RECORD)
    progress.close()
    shown = stream.getvalue()
    assert "20/50" in shown
    assert "loss=1.2500" in shown
    assert "peak=3.0 MiB" in shown


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_other_ranks_are_silent(stream: io.StringIO) -> None:
    progress = Progress(50, enabled=False, stream=stream)
    progress.advance()
    progress.show(RECORD)
    progress.close()
    assert stream.getvalue() == ""


def test_log_is_one_record_per_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(RECORD)
    log.write({**RECORD, "step": 30})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [20, 30]
    assert read_metrics(path)[0] == RECORD


def test_new_run_starts_with_an_empty_log(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").write(RECORD)
    MetricsLog(tmp_path / "metrics.jsonl")
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_resumed_run_keeps_what_it_does_not_repeat(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (10, 20, 30):
        log.write({**RECORD, "step": step})
    MetricsLog(tmp_path / "metrics.jsonl", resumed_at=20)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [10, 20]


def test_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsLog(path).write(RECORD)
    with path.open("a") as file:
        file.write('{"step": 3')
    assert read_metrics(path) == [RECORD]


def test_numbers_that_json_has_not_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        MetricsLog(tmp_path / "metrics.jsonl").write({"loss": float("nan")})


@pytest.mark.skipif(not _memory.can_reset_peak(), reason="needs the peak of a step alone")
def test_meter_sees_the_peak_of_steps_alone() -> None:
    meter = Meter()
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
    assert meter.steps == 3


def test_meter_says_when_it_cannot_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "can_reset_peak", lambda: False)
    meter = Meter()
    assert meter.rate(8) == 0.0
    meter.start()
    meter.stop()
    assert meter.steps == 1 and meter.rate(8) == 8 / meter.seconds
    assert meter.peak_bytes is None
