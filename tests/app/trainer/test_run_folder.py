"""The folder of a run: one run at a time, and nothing of an earlier one is lost."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_recompute import _run_folder
from paddle_recompute.app.launch import RankFailedError, launch_with_restarts, restarts
from paddle_recompute.app.report import append_record, read_metrics, read_records
from paddle_recompute.app.trainer import Callback, Run, Trainer, recorder
from paddle_recompute.app.trainer.recorder import keep_until
from paddle_recompute.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LaunchError,
    OutputError,
)
from tests.app.trainer.test_trainer import tiny

SHORT = {"train__max_steps": 2, "train__eval_before": False}
WAYS = ("train.resume=auto", "name another folder", "train.overwrite=true")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------------- a run that is there


def test_a_run_that_saved_nothing_is_there_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = folder / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 1, "loss": 2.0}\n')
    best = metrics.with_name("best") / "step-9" / "model.safetensors"
    best.parent.mkdir(parents=True)
    best.write_text("trained")
    with pytest.raises(ConfigError, match="holds the metrics of a run that saved no checkpoint"):
        Trainer(tiny(folder, **SHORT)).run()
    Trainer(tiny(folder, **SHORT, train__resume="auto", train__eval_every=1)).run()
    said = capsys.readouterr().out
    assert "metrics.before-1.jsonl" in said and "Its best model is kept in" in said
    assert (folder / "run/best.before-1/step-9/model.safetensors").read_text() == "trained"
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


def test_a_run_is_refused_with_three_ways_out_and_overwrite_removes_nothing_else(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished
    (folder / "run" / "notes.txt").write_text("mine")
    before = contents(folder / "run")
    with pytest.raises(ConfigError) as caught:
        Trainer(tiny(folder, **SHORT, train__seed=1)).run()
    assert f"train.output_dir: {folder / 'run'} holds a run of 2 steps" in str(caught.value)
    for way in WAYS:
        assert way in str(caught.value)
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
    events = read_records(folder / "run" / "events.jsonl", "time")
    (start,) = [one for one in events if one["event"] == "start"]  # a journal of its own
    assert start["config"]["train"]["max_steps"] == 1


# ---------------------------------------------------------------------------- two runs at once


def test_the_second_of_two_runs_is_refused_until_the_first_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_run_folder, "PATIENCE", 0.2)
    told = rf"{folder / 'run'} .*\(pid {os.getpid()} on {socket.gethostname()}\)"
    with _run_folder.hold(folder / "run", print), pytest.raises(ConfigError, match=told):
        Trainer(tiny(folder, **SHORT, train__resume="auto")).run()
    assert not (folder / "run" / "checkpoint").exists()
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


@pytest.mark.parametrize(("overwrite", "saves"), [(False, False), (True, False), (True, True)])
def test_ranks_that_are_started_again_go_on_with_their_own_run(
    overwrite: bool, saves: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is to be removed, and is not yet, is nothing to go on from."""
    commands = []

    def launch(config: Any, command: list[str], **_: Any) -> None:
        commands.append(command)
        if len(commands) == 1:
            (folder / "run" / "metrics.jsonl").write_text("{}\n")
            if saves:
                (folder / "run" / "checkpoint" / "step-2").mkdir(parents=True)
            raise RankFailedError("rank 1 was ended by SIGKILL", -9)

    monkeypatch.setattr(restarts, "launch", launch)
    if overwrite:
        (folder / "run" / "checkpoint" / "step-1").mkdir(parents=True)
    launch_with_restarts(tiny(folder, train__overwrite=overwrite), ["train"], max_restart=1)
    goes_on = ["train.resume=auto", "train.overwrite=false"]
    assert commands == [["train"], ["train", *(goes_on if saves or not overwrite else [])]]


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


def test_a_fault_while_the_metrics_are_written_again_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sound = tmp_path / "metrics.jsonl", Path.write_text
    sound(path, "".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))

    def writes_half(file: Path, text: str, **options: Any) -> None:
        sound(file, text[: len(text) // 2], **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", writes_half)
    with pytest.raises(OutputError, match="No space left"):
        keep_until(2, path)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]


# --------------------------------------------------------------- a full disk, a folder that is gone


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs to mount a disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    descriptor = os.open(place / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(512))
    except OSError:
        os.close(descriptor)


def test_a_full_disk_at_a_checkpoint_and_at_the_start(folder: Path, small_disk: Path) -> None:
    settings = {"train__output_dir": str(small_disk / "run"), "train__save_every": 1}
    with pytest.raises((CheckpointError, OutputError), match="cannot be written"):
        Trainer(tiny(folder, **settings, train__max_steps=8, train__keep=8)).run()
    fill(small_disk)
    with pytest.raises(ConfigError, match=r"train\.output_dir: .*\(No space left on device\)"):
        Trainer(tiny(folder, train__output_dir=str(small_disk / "other"))).run()


def test_a_folder_that_is_removed_during_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_and_write(path: Path, record: dict[str, Any]) -> None:
        if record["step"] == 3:
            shutil.rmtree(folder / "run")
        append_record(path, record)

    monkeypatch.setattr(recorder, "append_record", remove_and_write)
    with pytest.raises(OutputError, match=r"metrics\.jsonl: .* there is no such folder\)"):
        Trainer(tiny(folder, train__max_steps=5)).run()
