"""What is told of a run: to callbacks, in order and on every rank, and in its journal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_recompute import Trainer
from paddle_recompute.app.report import read_metrics, read_records
from paddle_recompute.app.trainer import Callback, Run
from paddle_recompute.app.trainer.events import NOTED_STEP
from paddle_recompute.distributed import values_of_ranks
from tests.app.report.pages import Page
from tests.app.trainer.test_trainer import tiny, unmeasured
from tests.ranks import run_ranks

SETTINGS: dict[str, Any] = {
    "train__max_steps": 4,
    "train__log_every": 2,
    "train__save_every": 3,
    "train__eval_before": False,
}


class Noting(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.records: list[dict[str, Any]] = []

    def on_start(self, run: Run) -> None:
        self.seen.append(("start", run.done, run.total))

    def after_step(self, run: Run) -> None:
        self.seen.append(("step", run.step))
        assert run.result is not None and run.result.loss > 0

    def on_log(self, run: Run, record: dict[str, Any]) -> None:
        self.seen.append(("log", run.step))
        self.records.append(record)

    def on_save(self, run: Run) -> None:
        self.seen.append(("save", run.step))
        assert (run.folder / "checkpoint" / f"step-{run.step}").is_dir(), "ours come first"

    def on_end(self, run: Run) -> None:
        self.seen.append(("end", run.step))


def test_they_are_told_in_order(folder: Path) -> None:
    noted = Noting()
    Trainer(tiny(folder, **SETTINGS), callbacks=[noted]).run()
    assert noted.seen == [
        ("start", 0, 4),
        *(("step", 1), ("step", 2), ("log", 2)),
        *(("step", 3), ("save", 3)),
        *(("step", 4), ("log", 4), ("save", 4)),
        ("end", 4),
    ]
    assert read_metrics(folder / "run" / "metrics.jsonl") == noted.records


class Gathering(Callback):
    """Uses a collective, which works because all ranks are told the same in the same order."""

    def __init__(self) -> None:
        self.losses: list[Any] = []

    def after_step(self, run: Run) -> None:
        assert run.result is not None
        self.losses.append(values_of_ranks([run.rank, run.result.loss], "the losses"))


@unmeasured
def train_and_gather(folder: str) -> Any:
    gathered = Gathering()
    ranks = {"launch__num_ranks": 2, "launch__device": "cpu"}
    Trainer(tiny(Path(folder), **SETTINGS, **ranks), callbacks=[gathered]).run()
    return gathered.losses


def test_a_callback_may_use_a_collective_and_the_step_of_each_rank_is_noted_once(
    folder: Path,
) -> None:
    first, second = run_ranks(train_and_gather, 2, folder=str(folder))
    assert first == second and len(first) == 4
    assert all([rank for rank, _ in of_step] == [0, 1] for of_step in first)
    events = read_records(folder / "run/events.jsonl", "time")
    (noted,) = [one for one in events if one["event"] == "times"]
    assert noted["step"] == NOTED_STEP and len(noted["ranks"]) == 2
    for step, backward, sums, under, wait in noted["ranks"]:
        assert step > backward > 0 and sums >= under >= 0 and sums > 0 and wait >= 0


# ------------------------------------------------------------------------------- the journal

SAVED: dict[str, Any] = {"train__max_steps": 3, "train__save_every": 1}


class FailingSave(Callback):
    def on_save(self, run: Run) -> None:
        if run.step == 2:
            raise RuntimeError("planted")


@pytest.mark.usefixtures("report")
def test_a_fault_and_the_start_after_it_are_noted(folder: Path) -> None:
    noted = Noting()
    with pytest.raises(RuntimeError, match="planted"):
        Trainer(tiny(folder, **SAVED), callbacks=[noted, FailingSave()]).run()
    assert noted.seen[-2:] == [("save", 2), ("end", 2)]  # the end is told after an error too
    Trainer(tiny(folder, **SAVED, train__resume=True)).run()
    events = read_records(folder / "run/events.jsonl", "time")
    kinds = [one["event"] for one in events if one["event"] != "said"]
    first = ["start", "data", "examples", "steps", "end"]
    assert kinds == [*first, "start", "data", "steps", "examples", "end"]
    assert [one["why"] for one in events if one["event"] == "end"] == [
        "RuntimeError: planted",
        "finished",
    ]
    assert [one["done"] for one in events if one["event"] == "steps"] == [0, 2]
    assert [one["time"] for one in events] == sorted(one["time"] for one in events)
    text = Page(folder / "run/report.html").text
    for words in ("What happened: 2 starts", "ended: RuntimeError: planted", "3 of 3 steps"):
        assert words in text


def test_the_journal_is_that_of_the_run(finished: Path) -> None:
    record = json.loads((finished / "run/result.json").read_text())
    records = read_records(finished / "run/events.jsonl", "time")
    events = {one["event"]: one for one in records}
    data, examples = events["data"], events["examples"]
    assert examples["when"] == "trained" and len(examples["queries"]) == 7  # each third of 20
    for one in examples["queries"]:
        scores = [hit["score"] for hit in one["hits"]]
        assert scores == sorted(scores, reverse=True) and len(scores) == 3
        assert (one["hits"][0]["text"] == one["answer"]) == (one["rank"] == 1)
    assert data["valid"] == record["queries"] and data["pool"] == record["pool_size"]
    for side in data["lengths"].values():
        counts = np.array(side["counts"])
        assert counts.sum() == data["train"] and len(counts) == side["longest"] + 1
        mean = (counts * np.arange(len(counts))).sum() / data["train"]
        assert side["mean"] == pytest.approx(mean)
    # A start says what it does, and how long it took.
    said = [one["text"] for one in records if one["event"] == "said"]
    begun = ("Preparing the", "Cutting", "Building", "Training: steps 1 to 2")
    places = [next(at for at, text in enumerate(said) if text.startswith(one)) for one in begun]
    assert places == sorted(places)
    (first,) = (text for text in said if text.startswith("Step 1: loss "))
    assert re.search(r", \d+\.\d s after the start$", first), first
