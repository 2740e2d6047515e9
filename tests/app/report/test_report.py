"""The page of a run stands alone, tells the figures, and odd runs do not break it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from bokeh.models import ColumnDataSource
from click.testing import Result

from paddle_recompute.app.cli import _process
from paddle_recompute.app.report import (
    EventLog,
    _written,
    append_record,
    read_records,
    retrieval_table,
    write_report,
)
from paddle_recompute.app.report._charts import curves_of
from paddle_recompute.app.report._files import RunFiles
from paddle_recompute.errors import DependencyError, OutputError, PlanError
from tests.app.commands import command
from tests.app.report.folders import CONFIG, EVENTS, METRICS, RECORD, TIMES, write_run
from tests.app.report.pages import Page

SCRIPTS = 3
"""The library, its level of logging, and the charts."""


def page_of(folder: Path, **changes: Any) -> Page:
    return Page(write_report([write_run(folder, **changes)]))


def drawn(folder: Path, title: str) -> dict[str, list[Any]]:
    """The y of each curve of a part, by its name."""
    sources = curves_of([RunFiles.read(folder)])[title].select({"type": ColumnDataSource})
    return {one.data["curve"][0]: list(one.data["y"]) for one in sources}


def test_page_stands_alone_and_tells_the_figures(tmp_path: Path) -> None:
    write_run(tmp_path / "a<b")
    assert report(tmp_path / "a<b").stdout == f"written: {tmp_path / 'a<b/report.html'}\n"
    page = Page(tmp_path / "a<b" / "report.html")
    assert page.links == []
    assert page.scripts == SCRIPTS
    assert (tmp_path / "a<b/report.html").stat().st_size < 1.5e6
    for words in ("25.0%", "50.0%", "-60%", "1,234", "10,000 candidates", "2 ranks", "0.0010"):
        assert words in page.text
    for words in ("a<b", "汉语<.tsv", "河<b>", "rank 7", "rank 1", "12 duplicates removed"):
        assert words in page.text
    assert "finished · 39 of 39 steps · 2 ranks · global batch 256 · " in page.text
    for words in ("1 min 10 s", "3.3.1", "train.seed 0 line 3"):
        assert words in page.text
    assert "Step 3 on each rank" in page.text
    assert "rank 0 100.5 80.0 39.0 29.0 15.0 rank 1 99.2 78.8 39.0 29.0 15.0" in page.text


def test_texts_of_strangers_stay_texts(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script>"
    events = json.loads(json.dumps(EVENTS).replace("a river", bad).replace("12 dup", bad))
    page = page_of(tmp_path / "run", events=events, metrics=[{**one, bad: 1.0} for one in METRICS])
    assert page.scripts == SCRIPTS
    assert bad in page.text


def test_memory_is_drawn_beside_the_plain_step_and_a_skipped_step_leaves_a_gap(
    tmp_path: Path,
) -> None:
    metrics = [{**METRICS[0], "loss": None}, *METRICS[1:3]]
    folder = write_run(tmp_path / "run", metrics=metrics)
    found = drawn(folder, "Peak memory of a step, MiB")
    assert found == {"peak_bytes": [100.0] * 3, "plain step": [250.0] * 2}
    first, *rest = drawn(folder, "Loss")["loss"]
    assert math.isnan(first) and rest == [2.5, 5.0 / 3]


def test_every_figure_of_the_metrics_has_a_curve(tmp_path: Path) -> None:
    later = {"valid_loss": 3.0, "valid": {"recall@1": 0.5, "ndcg@10": 0.6}, "temperature": 0.1}
    metrics = [*METRICS[:9], {**METRICS[9], **later}, {"step": 11, "valid_loss": 2.5}]
    folder = write_run(tmp_path / "run", metrics=metrics, record=None)
    losses = drawn(folder, "Loss")
    assert losses["loss"] == [one["loss"] for one in METRICS[:10]]
    assert losses["valid_loss"] == [3.0, 2.5]
    assert set(drawn(folder, "Held-out retrieval")) == {"valid.recall@1", "valid.ndcg@10"}
    titles = list(curves_of([RunFiles.read(folder)]))
    assert titles == [
        *("Loss", "Gradient norm", "Learning rate", "Examples per second"),
        *("Peak memory of a step, MiB", "Temperature", "Held-out retrieval"),
    ]


UNTRAINED_NOT_MEASURED = RECORD | {name: None for name in RECORD if name.startswith("untrained_")}


@pytest.mark.parametrize(
    ("changes", "there", "absent"),
    [
        ({"metrics": [], "record": UNTRAINED_NOT_MEASURED}, "trained recall@1 - 0.2500", "loss,"),
        ({"metrics": METRICS[:1]}, "loss, 5 at first", "Loss scale"),
        ({"events": []}, "39 of 39 steps", "Environment"),
        ({"record": RECORD | {"steps": 20}}, "ended before its last step", "25.0%"),
        ({"events": [EVENTS[0] | {"ranks": 64}, TIMES]}, "The first 2 of 64 ranks.", "finished at"),
    ],
    ids=["no step", "one step", "of an earlier version", "raised to more steps", "many ranks"],
)
def test_odd_runs_have_a_page(
    changes: dict[str, Any], there: str, absent: str, tmp_path: Path
) -> None:
    text = page_of(tmp_path / "run", **changes).text
    assert there in text and absent not in text


def test_faults_that_were_met_are_told(tmp_path: Path) -> None:
    again = [{"event": "start", **EVENTS[0]}, {"event": "steps", "done": 20, "total": 39}]
    killed = EVENTS[:5]
    stopped = [*again, {"event": "end", "why": "PeerError: rank 1 is gone"}]
    text = page_of(tmp_path / "run", events=[*killed, *stopped, *again, EVENTS[-1]]).text
    assert "What happened: 3 starts" in text
    assert "ended silently: the process was killed" in text
    assert "ended: PeerError: rank 1 is gone" in text
    assert text.count("training goes on after step 20") == 2


def test_a_run_that_goes_on_is_loaded_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", record=None, events=EVENTS[:5])
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = write_report([folder], reload_seconds=7)
        assert 'http-equiv="refresh" content="7"' in path.read_text()
        assert "running · 39 of 39 steps" in Page(path).text
    path = write_report([folder], reload_seconds=7)
    assert "refresh" not in re.sub(r"<script.*?</script>", "", path.read_text(), flags=re.DOTALL)
    assert "ended before its last step" in Page(path).text


@pytest.mark.parametrize(
    "name, line",
    [
        ("result.json", "[1]"),
        ("events.jsonl", '{"time": 1, "event": "examples"}'),
        ("events.jsonl", '{"time": 1e30, "event": "said", "text": "x"}'),
        ("events.jsonl", '{"time": 1, "event": "said", "text": "\\ud800"}'),
        ("metrics.jsonl", f'{{"step": 40, "big": {10**400}}}'),
        ("result.json", json.dumps({**RECORD, "recall@1": "high"})),
    ],
)
def test_wrong_records_are_refused_in_one_sentence(tmp_path: Path, name: str, line: str) -> None:
    folder = write_run(tmp_path / "run")
    with (folder / name).open("w" if name == "result.json" else "a") as file:
        file.write(f"{line}\n")
    with pytest.raises(OutputError, match=f"{name}.* damaged") as refused:
        write_report([folder])
    assert str(refused.value).startswith(str(folder))
    assert not (folder / "report.html").exists()


def test_a_torn_line_is_cut_off_at_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    for why in ("killed", "finished"):
        journal = EventLog(file)
        journal.open()
        journal.note("end", why=why)
        with file.open("ab") as torn:
            torn.write('{"time": 1.0, "event": "汉'.encode()[:-1])
    journal = EventLog(file)
    journal.open()
    journal.note("start")
    assert [record["event"] for record in read_records(file, "time")] == ["end", "end", "start"]


def test_runs_are_compared(tmp_path: Path) -> None:
    metrics = [*METRICS, {"step": 40, "valid": {"recall@1": 0.5, "mrr": 0.6}}]
    first = write_run(tmp_path / "first", metrics=metrics)
    train = {"train": {"seed": 7, "resume": True}, "recompute": {"memory_budget": 80 << 20}}
    events = [{**EVENTS[0], "config": {**CONFIG, **train}}, *EVENTS[1:]]
    record = {**RECORD, "steps": 40, "mrr": 0.5}
    other = write_run(tmp_path / "other", metrics=metrics, events=events, record=record)
    page = Page(write_report([first, other], tmp_path / "both.html"))
    assert page.links == []
    for words in ("mrr - 0.5", "train.seed 0 7", "recompute.memory_budget - 80.0 MiB"):
        assert words in page.text
    assert "train.resume" not in page.text and "global_batch" not in page.text
    charts = curves_of([RunFiles.read(first), RunFiles.read(other)])
    assert {"Loss", "Held-out retrieval: recall@1", "Held-out retrieval: mrr"} <= {*charts}
    for one in charts.values():
        assert [item.label.value for item in one.legend[0].items] == ["first", "other"]


def test_without_bokeh_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_written.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="pip install bokeh"):
        _written.require_bokeh()


def test_table_for_the_terminal() -> None:
    assert retrieval_table(RECORD).splitlines() == [
        "2000 held-out queries, 10000 candidates for each",
        "             before training     trained",
        "recall@1              0.0010      0.2500",
        "recall@10             0.0100      0.5000",
        "mrr                   0.0020      0.3330",
    ]


@pytest.mark.parametrize(("policy", "is_read"), [("all", False), ("budget", True)])
def test_the_plan_of_an_earlier_run_is_not_shown(
    policy: str, is_read: bool, tmp_path: Path
) -> None:
    """The run before had ``recompute.policy: budget``, and was removed or went on without it."""
    start = {**EVENTS[0], "config": {**CONFIG, "recompute": {"policy": policy}}}
    folder = write_run(tmp_path / "run", events=[start, *EVENTS[1:]])
    (folder / "plan.json").write_text("{}")
    with pytest.raises(PlanError) if is_read else contextlib.nullcontext():
        write_report([folder])


# -------------------------------------------------------------------------------------- the command


@pytest.fixture(autouse=True)
def _settings_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would choose another path of MKL, for this process and all tests after it."""
    monkeypatch.setattr(_process, "speed_settings", lambda *_, **__: {})


def report(*arguments: str | Path, code: int = 0) -> Result:
    return command("report", *arguments, code=code)


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


def test_a_folder_without_a_run_and_an_output_that_is_no_page_are_refused(
    tmp_path: Path,
) -> None:
    assert "holds no metrics.jsonl" in report(tmp_path, code=2).output
    run = write_run(tmp_path / "run")
    file = tmp_path / "run.yaml"
    file.write_text("mode: dygraph")
    assert "must end in .html" in report(run, "--output", file, code=2).stderr
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
        report(folder, "--follow")
    assert ["running · 1 of 39" in one for one in seen] == [True, True, False]
    assert "running · 2 of 39" in seen[2]
    assert written[0] == written[1] < written[2]
    assert "ended before its last step · 2 of 39" in Page(page).text
