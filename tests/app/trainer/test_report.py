"""The page stands alone, its pictures show the figures, and odd runs do not break it."""

from __future__ import annotations

import base64
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paddle_recompute.app.trainer.report import (
    loss_figure,
    memory_figure,
    recall_figure,
    retrieval_table,
    write_report,
)
from paddle_recompute.errors import DependencyError

pytestmark = pytest.mark.usefixtures("pictures")
RECORD: dict[str, Any] = {
    "recall@1": 0.25,
    "recall@10": 0.5,
    "mrr": 0.333,
    "untrained_recall@1": 0.001,
    "untrained_recall@10": 0.01,
    "untrained_mrr": 0.002,
    "pool_size": 10_000,
    "queries": 2_000,
    "peak_bytes": 100 * 2**20,
    "plain_peak_bytes": 250 * 2**20,
    "examples_per_second": 1234.5,
    "steps": 300,
    "world_size": 2,
    "output_dir": "outputs/a<b",
}
METRICS = [{"step": step, "loss": 5.0 / step, "lr": 1e-4 * step} for step in range(1, 40)]
CONFIG = {"contrastive": {"global_batch": 256}, "data": {"train_file": "汉语<.tsv"}}


def test_page_stands_alone(tmp_path: Path) -> None:
    page = write_report(tmp_path, record=RECORD, metrics=METRICS, config=CONFIG).read_text("utf-8")
    assert not re.search(r'(src|href)="(?!data:)', page)
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    files = [tmp_path / f"{name}.png" for name in ("loss", "memory", "recall")]
    assert [base64.b64decode(one) for one in embedded] == [file.read_bytes() for file in files]


def test_page_tells_the_figures(tmp_path: Path) -> None:
    page = write_report(tmp_path, record=RECORD, metrics=METRICS, config=CONFIG).read_text("utf-8")
    for words in ("25.0%", "50.0%", "-60%", "1,234", "10,000 candidates", "2 ranks", "0.0010"):
        assert words in page
    assert "a&lt;b" in page
    assert "汉语&lt;.tsv" in page


@pytest.mark.parametrize("metrics", [[], METRICS[:1]])
def test_run_without_a_curve(tmp_path: Path, metrics: list[dict[str, Any]]) -> None:
    record = {**RECORD, **{key: None for key in RECORD if key.startswith("untrained_")}}
    page = write_report(tmp_path, record=record, metrics=metrics, config=CONFIG).read_text("utf-8")
    assert "<td>-</td>" in page


def test_loss_picture_shows_every_record() -> None:
    loss, rate = loss_figure(METRICS).axes
    assert list(loss.lines[0].get_ydata()) == [record["loss"] for record in METRICS]
    assert list(rate.lines[0].get_ydata()) == [record["lr"] for record in METRICS]


def test_memory_picture_has_bars_in_proportion() -> None:
    [axes] = memory_figure(250 * 2**20, 100 * 2**20).axes
    configured, plain = (patch.get_width() for patch in axes.patches)
    assert (plain, configured) == (250.0, 100.0)


def test_plain_step_that_was_not_measured(tmp_path: Path) -> None:
    record = {**RECORD, "plain_peak_bytes": None}
    page = write_report(tmp_path, record=record, metrics=METRICS, config=CONFIG).read_text("utf-8")
    assert "<strong>100.0 MiB</strong>" in page
    [axes] = memory_figure(None, 100 * 2**20).axes
    assert "not measured" in [text.get_text() for text in axes.texts]


def test_recall_picture_has_a_bar_per_metric_and_state() -> None:
    [axes] = recall_figure(RECORD).axes
    heights = [patch.get_height() for patch in axes.patches]
    assert heights[:6] == [0.001, 0.25, 0.01, 0.5, 0.002, 0.333]


def test_without_matplotlib_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "paddle_recompute.app.trainer.report")
    with pytest.raises(DependencyError, match="pip install matplotlib"):
        importlib.import_module("paddle_recompute.app.trainer.report")


def test_table_for_the_terminal() -> None:
    assert retrieval_table(RECORD).splitlines() == [
        "2000 held-out queries, 10000 candidates for each",
        "               untrained     trained",
        "recall@1          0.0010      0.2500",
        "recall@10         0.0100      0.5000",
        "mrr               0.0020      0.3330",
    ]


def test_what_the_tokens_leave_undecided_is_told() -> None:
    counts = {"unknown_queries": 3, "equal_queries": 0, "equal_answers": 1}
    said = "recall@1 is at most 0.9500: 3 queries are [UNK] alone, 1 answers share them with"
    lost = {**RECORD, **counts, "recall@1_ceiling": 0.95}
    assert said in retrieval_table(lost)
    assert "at most" not in retrieval_table(RECORD)  # of an earlier version, or nothing is lost
