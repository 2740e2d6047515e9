"""What a run notes of itself, start after start."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_recompute import Trainer
from paddle_recompute.app.report import read_records
from paddle_recompute.app.trainer import Callback, Run
from tests.app.report.pages import Page
from tests.app.trainer.test_trainer import tiny

SHORT: dict[str, Any] = {"train__max_steps": 3, "train__save_every": 1}


class Failing(Callback):
    def on_save(self, run: Run) -> None:
        if run.step == 2:
            raise RuntimeError("planted")


@pytest.mark.usefixtures("report")
def test_a_fault_and_the_start_after_it_are_noted(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="planted"):
        Trainer(tiny(folder, **SHORT), callbacks=[Failing()]).run()
    Trainer(tiny(folder, **SHORT, train__resume=True)).run()
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


def test_data_and_examples_are_those_of_the_run(finished: Path) -> None:
    record = json.loads((finished / "run/result.json").read_text())
    events = {one["event"]: one for one in read_records(finished / "run/events.jsonl", "time")}
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


def test_a_start_that_changes_nothing_leaves_no_trace(finished: Path) -> None:
    """Its record is kept; a run in its place begins a journal of its own."""
    file = finished / "run/events.jsonl"
    before = file.read_bytes()
    Trainer(tiny(finished, train__max_steps=2, train__resume=True)).run()
    assert file.read_bytes() == before
    Trainer(tiny(finished, train__max_steps=1, train__overwrite=True)).run()
    starts = [one for one in read_records(file, "time") if one["event"] == "start"]
    assert len(starts) == 1 and starts[0]["config"]["train"]["max_steps"] == 1


def test_a_start_says_what_it_does_and_how_long_it_took(finished: Path) -> None:
    events = read_records(finished / "run/events.jsonl", "time")
    said = [one["text"] for one in events if one["event"] == "said"]
    begun = ("Preparing the", "Cutting", "Measuring", "Building", "Training: steps 1 to 2")
    places = [next(at for at, text in enumerate(said) if text.startswith(one)) for one in begun]
    assert places == sorted(places)
    (first,) = (text for text in said if text.startswith("Step 1: loss "))
    assert re.search(r", \d+\.\d s after the start$", first), first
