"""SIGTERM and SIGINT save the step on all ranks; a rank that dies is started again from there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddle_recompute.app.report import append_record
from paddle_recompute.app.trainer import Callback, Run, Trainer, recorder
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.errors import StoppedError
from tests.app.commands import command
from tests.app.trainer.test_trainer import assert_same_run, tiny, unmeasured, write_pairs
from tests.ranks import ROOT, ranks_started_by, run_ranks

ENDLESS = 10**6
TWO = {"launch__num_ranks": 2, "recompute__enable": False}


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    write_pairs(folder / "pairs.tsv")
    changes = {"train__eval_before": False, "train__output_dir": str(folder / name), **changes}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tiny(folder, **changes).to_dict()))
    return file


# --------------------------------------------------------------------------------- one process


def test_one_process_saves_its_step_and_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt_and_write(path: Path, record: dict[str, Any]) -> None:
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        append_record(path, record)

    config = write_config(tmp_path, "run", train__resume="auto", train__save_every=100)
    with monkeypatch.context() as patch:
        patch.setattr(recorder, "append_record", interrupt_and_write)
        stopped = command("train", "--config", config, code=130)
    assert "Stopped by SIGINT; the steps so far are saved" in stopped.output
    assert "Traceback" not in stopped.output
    assert find_checkpoint(tmp_path / "run" / "checkpoint").step == 4
    for one in (config, write_config(tmp_path, "whole")):
        command("train", "--config", one)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# ------------------------------------------------------------------------------- several ranks


class Asking(Callback):
    def after_step(self, run: Run) -> None:
        if (run.rank, run.step) == (1, 3):
            os.kill(os.getpid(), signal.SIGTERM)


@unmeasured
def train_until_asked(folder: str) -> tuple[int, str]:
    settings = {"train__max_steps": 40, "train__eval_before": False, "mode": "static", **TWO}
    with pytest.raises(StoppedError) as caught:
        Trainer(tiny(Path(folder), **settings), callbacks=[Asking()]).run()
    return caught.value.code, str(caught.value)


def test_a_signal_to_one_rank_saves_the_same_step_of_a_program_on_all(folder: Path) -> None:
    first, second = run_ranks(train_until_asked, 2, folder=str(folder))
    assert first == second
    assert first[0] == 143 and first[1].startswith("Stopped by SIGTERM; the steps so far are saved")
    assert find_checkpoint(folder / "run" / "checkpoint").step == 4


@contextmanager
def started(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """The command ``train``; it is killed at the end of the block if it still runs."""
    run = subprocess.Popen(
        [sys.executable, "-m", "paddle_recompute", "train", "--config", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield run
    finally:
        run.kill()  # its ranks end with it
        run.communicate()


def wait_for(run: subprocess.Popen[str], what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not what():
        if time.monotonic() > deadline or run.poll() is not None:
            run.terminate()
            pytest.fail(f"did not come to it:\n{run.communicate(timeout=60)[0][-3000:]}")
        time.sleep(0.05)


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max((int(one.name[5:]) for one in (folder / "checkpoint").glob("step-*")), default=0)


@pytest.mark.timeout(300)  # starts two ranks twice
def test_launched_ranks(tmp_path: Path) -> None:
    """A second command is refused; a killed rank starts again; a signal saves the step."""
    folder = tmp_path / "run"
    settings = {"train__max_steps": ENDLESS, "train__save_every": 4, "train__resume": "auto"}
    config = write_config(tmp_path, "run", **TWO, **settings)
    with started(config, "--max-restart", "1") as run:
        wait_for(run, lambda: newest(folder) >= 4)
        # Another command is refused before it starts a rank, and touches nothing.
        logs = sorted((folder / "logs").iterdir())
        (told,) = command("train", "--config", config, code=2).output.splitlines()
        assert re.search(rf"{folder} .*\(pid {run.pid} on ", told)
        assert sorted((folder / "logs").iterdir()) == logs
        before, saved = ranks_started_by(run.pid), newest(folder)
        os.kill(before[1], signal.SIGKILL)
        wait_for(run, lambda: newest(folder) >= saved + 8)
        assert set(before.values()).isdisjoint(ranks_started_by(run.pid).values())
        run.send_signal(signal.SIGTERM)
        _, restarted, again = run.communicate(timeout=60)[0].partition("Starting again (1 of 1)")
    assert restarted
    assert run.returncode == 143, again
    assert "Resuming after step" in again
    assert "Stopped by SIGTERM; the steps so far are saved" in again
    assert "Traceback" not in again
    assert find_checkpoint(folder / "checkpoint").step >= saved + 8
