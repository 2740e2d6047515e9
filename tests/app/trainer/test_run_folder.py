"""The folder of a run: one run at a time, and nothing of an earlier one is lost."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_recompute import _run_folder
from paddle_recompute.app.launch import RankFailedError, launch_with_restarts, restarts
from paddle_recompute.app.report import read_metrics
from paddle_recompute.app.trainer import Callback, Run, Trainer
from paddle_recompute.app.trainer.recorder import keep_until
from paddle_recompute.errors import ConfigError, DataError, LaunchError
from tests.app.trainer.test_trainer import tiny
from tests.ranks import ROOT

SHORT = {"train__max_steps": 2, "train__eval_before": False}
WAYS = ("train.resume=auto", "name another folder", "train.overwrite=true")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------------- a run that is there


def test_a_folder_with_a_run_is_refused_with_three_ways_out(folder: Path) -> None:
    Trainer(tiny(folder, **SHORT)).run()
    before = contents(folder / "run")
    with pytest.raises(ConfigError) as caught:
        Trainer(tiny(folder, **SHORT, train__seed=1)).run()
    assert f"train.output_dir: {folder / 'run'} holds a run of 2 steps" in str(caught.value)
    for way in WAYS:
        assert way in str(caught.value)
    assert contents(folder / "run") == before


def test_a_run_that_saved_nothing_is_there_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(ConfigError, match="holds the metrics of a run that saved no checkpoint"):
        Trainer(tiny(folder, **SHORT)).run()
    Trainer(tiny(folder, **SHORT, train__resume="auto")).run()
    assert "metrics.before-1.jsonl" in capsys.readouterr().out
    kept = metrics.with_name("metrics.before-1.jsonl")
    assert kept.read_text() == '{"step": 1, "loss": 2.0}\n'
    assert [record["step"] for record in read_metrics(metrics)] == [1, 2]


def test_a_record_without_its_checkpoints_is_not_written_over(folder: Path) -> None:
    """Somebody has removed the checkpoints, which are large, and kept the figures."""
    record = folder / "run" / "result.json"
    record.parent.mkdir()
    record.write_text("{}")
    for resume in (False, "auto"):
        with pytest.raises(ConfigError, match=r"result\.json of a run without its checkpoints"):
            Trainer(tiny(folder, **SHORT, train__resume=resume)).run()
    assert record.read_text() == "{}"


class WithoutRecord(Callback):
    def on_start(self, run: Run) -> None:
        assert not (run.folder / "result.json").exists()


def test_overwrite_removes_the_run_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(tiny(folder, **SHORT, train__save_every=1)).run()
    (folder / "run" / "notes.txt").write_text("mine")
    before = contents(folder / "run")
    again = {**SHORT, "train__max_steps": 1, "train__overwrite": True, "train__resume": "auto"}
    with pytest.raises(DataError, match="there is no such file"):  # the old run is still there
        Trainer(tiny(folder, **again, data__train_file=str(folder / "none.tsv"))).run()
    assert contents(folder / "run") == before
    Trainer(tiny(folder, **again), callbacks=[WithoutRecord()]).run()
    said = capsys.readouterr().out
    assert f"train.overwrite: the run in {folder / 'run'} is removed" in said
    assert "Resuming" not in said
    kept = {path.name for path in (folder / "run" / "checkpoint").iterdir()}
    assert kept == {"step-1"}
    assert [record["step"] for record in read_metrics(folder / "run" / "metrics.jsonl")] == [1]
    assert (folder / "run" / "notes.txt").read_text() == "mine"


# ---------------------------------------------------------------------------- two runs at once

HOLD = """
import os, sys, time
from pathlib import Path
from paddle_recompute import _run_folder
with _run_folder.hold(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder / "run")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_the_second_of_two_runs_is_refused_until_the_first_is_gone(
    folder: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_run_folder, "PATIENCE", 0.2)
    with pytest.raises(ConfigError) as caught:
        Trainer(tiny(folder, **SHORT, train__resume="auto")).run()
    told = str(caught.value)
    assert re.search(rf"{folder / 'run'} .*\(pid {holder.pid} on {socket.gethostname()}\)", told)
    assert not (folder / "run" / "checkpoint").exists()
    holder.kill()
    assert Trainer(tiny(folder, **SHORT, train__resume="auto")).run()["steps"] == 2


def test_a_disk_without_locks_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert Trainer(tiny(folder, **SHORT)).run()["steps"] == 2
    said = capsys.readouterr().out
    assert f"the disk of {folder / 'run'} has no locks (No locks available)" in said
    assert "two runs at once are not noticed" in said


def test_a_lock_that_cannot_be_opened_is_told(folder: Path) -> None:
    """It is of another user, for example; here it is a folder."""
    (folder / "run" / ".lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run/\.lock cannot be opened to write \(Is a directory"):
        Trainer(tiny(folder, **SHORT)).run()


@pytest.mark.parametrize(
    ("settings", "saves", "added"),
    [
        ({}, False, ["train.resume=auto", "train.overwrite=false"]),
        ({}, True, ["train.resume=auto", "train.overwrite=false"]),
        # What is to be removed, and is not yet, is nothing to go on from.
        ({"train__overwrite": True}, False, []),
        ({"train__overwrite": True}, True, ["train.resume=auto", "train.overwrite=false"]),
    ],
)
def test_ranks_that_are_started_again_go_on_with_their_own_run(
    settings: dict[str, Any],
    saves: bool,
    added: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands = []

    def launch(config: Any, command: list[str], **_: Any) -> None:
        commands.append(command)
        if len(commands) == 1:
            (folder / "run" / "metrics.jsonl").write_text("{}\n")
            if saves:
                (folder / "run" / "checkpoint" / "step-2").mkdir(parents=True)
            raise RankFailedError("rank 1 was ended by SIGKILL")

    monkeypatch.setattr(restarts, "launch", launch)
    if settings:
        (folder / "run" / "checkpoint" / "step-1").mkdir(parents=True)
    launch_with_restarts(tiny(folder, **settings), ["train"], max_restart=1)
    assert commands == [["train"], ["train", *added]]


def test_a_command_on_a_folder_with_a_run_starts_no_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "run" / "checkpoint" / "step-7").mkdir(parents=True)
    monkeypatch.setattr(restarts, "launch", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(ConfigError, match="holds a run of 7 steps"):
        launch_with_restarts(tiny(folder), ["train"])
    monkeypatch.setattr(restarts, "launch", lambda *_, **__: None)
    launch_with_restarts(tiny(folder, train__resume="auto"), ["train"])
    with pytest.raises((ConfigError, LaunchError), match="cannot be made, or written to"):
        launch_with_restarts(tiny(folder, train__output_dir="/dev/null/run"), ["train"])


# ---------------------------------------------------------------------------- the metrics


def dies_at(call: int, act: Callable[[], object]) -> bool:
    """Whether a process that is killed at its `call`-th call of C code for the file was."""
    child = os.fork()
    if not child:
        left = iter(range(call))

        def count(frame: Any, event: str, argument: Any) -> None:
            module = Path(frame.f_code.co_filename).stem
            of_file = module in ("recorder", "pathlib", "_local")
            if event == "c_call" and of_file and next(left, None) is None:
                os._exit(9)

        sys.setprofile(count)
        act()
        os._exit(0)
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_a_kill_at_any_moment_of_the_rewrite_loses_no_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3)]
    call = 0
    path.write_text("".join(lines))
    while dies_at(call, lambda: keep_until(2, path)):
        assert [record["step"] for record in read_metrics(path)][:2] == [1, 2], call
        path.write_text("".join(lines))
        call += 1
    assert call > 5
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
