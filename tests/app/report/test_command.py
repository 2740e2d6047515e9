"""``paddle-recompute report``: one run, several, and one that goes on."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paddle_recompute.app.cli import _process, main
from paddle_recompute.app.report import _written, append_record
from tests.app.report.folders import EVENTS, METRICS, write_run
from tests.app.report.pages import Page


@pytest.fixture(autouse=True)
def _settings_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would choose another path of MKL, for this process and all tests after it."""
    monkeypatch.setattr(_process, "speed_settings", lambda *_, **__: {})


def report(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments])


def test_the_page_is_made_again_with_the_sources_of_the_settings(tmp_path: Path) -> None:
    result = report(str(write_run(tmp_path / "run")))
    assert result.stdout == f"written: {tmp_path / 'run/report.html'}\n"
    assert "train.seed 0 line 3" in Page(tmp_path / "run/report.html").text


def test_runs_are_compared_and_keep_their_own_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    monkeypatch.chdir(tmp_path)
    assert report(*runs).stdout == "written: comparison.html\n"
    assert report(*runs, "--output", "new/both.html").stdout == "written: new/both.html\n"
    told = report(*runs, "--output", "new/both.html", "--json").stdout
    assert json.loads(told) == {"written": "new/both.html"}
    assert not list(tmp_path.glob("?/report.html"))
    assert "2 runs" in Page(tmp_path / "new/both.html").text


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    result = report(str(tmp_path))
    assert result.exit_code == 2 and "holds no metrics.jsonl" in result.output


def test_a_page_does_not_replace_a_configuration(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    file = tmp_path / "run.yaml"
    file.write_text("mode: dygraph")
    result = report(str(run), "--output", str(file))
    assert result.exit_code == 2 and "must end in .html" in result.stderr
    assert file.read_text() == "mode: dygraph"


def test_a_run_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", record=None, metrics=METRICS[:1], events=EVENTS[:5])
    page = folder / "report.html"
    seen, written = [], []

    def sleep(seconds: float) -> None:
        """The run goes on: nothing new, another step, and at last its end."""
        seen.append(Page(page).text[:60])
        written.append(page.stat().st_mtime_ns)
        if len(seen) == 2:
            append_record(folder / "metrics.jsonl", METRICS[1])
        if len(seen) == 3:
            fcntl.flock(lock, fcntl.LOCK_UN)

    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(_written.time, "sleep", sleep)
        assert report(str(folder), "--follow").exit_code == 0
    assert ["running · 1 of 39" in one for one in seen] == [True, True, False]
    assert "running · 2 of 39" in seen[2]
    assert written[0] == written[1] < written[2]
    assert "ended before its last step · 2 of 39" in Page(page).text
