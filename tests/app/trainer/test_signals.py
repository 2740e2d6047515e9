"""SIGTERM and SIGINT save the step on all ranks; a rank that dies is started again from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddle_recompute.checkpoint import find_checkpoint
from tests.app.trainer.test_trainer import assert_same_run, tiny, write_pairs
from tests.ranks import ROOT, ranks_started_by

pytestmark = pytest.mark.timeout(300)  # starts of two ranks, each with Paddle

STEPS = 12
# A step that takes long enough for a signal to come in the midst of the run.
SLOW = """
import os, sys, time, runpy
from paddle_recompute.static_graph import StaticTrainStep
from paddle_recompute.train_step import TrainStep
def slow_down(step):
    made = step.__call__
    def slowly(self, *arguments, **named):
        time.sleep(0.1)
        return made(self, *arguments, **named)
    step.__call__ = slowly
slow_down(TrainStep)
slow_down(StaticTrainStep)
"""


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    write_pairs(folder / "pairs.tsv")
    changes = {
        "train__max_steps": STEPS,
        "train__save_every": 100,
        "train__eval_before": False,
        **changes,
    }
    tree = tiny(folder, train__output_dir=str(folder / name), **changes).to_dict()
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def train(folder: Path, config: Path, *more: str) -> subprocess.Popen[str]:
    """The command, its steps slowed down in every process."""
    (folder / "site").mkdir(exist_ok=True)
    # TrainStep is imported late, so the patch is made where the trainer's module asks for it.
    (folder / "site" / "sitecustomize.py").write_text(
        "import os\n"
        "if 'SLOW_STEPS' in os.environ:\n"
        "    from importlib import abc, machinery\n"
        "    import sys\n"
        "    class Finder(abc.MetaPathFinder):\n"
        "        def find_spec(self, name, path, target=None):\n"
        "            if name != 'paddle_recompute.app.trainer.trainer':\n"
        "                return None\n"
        "            sys.meta_path.remove(self)\n"
        f"            exec({SLOW!r}, {{}})\n"
        "            return None\n"
        "    sys.meta_path.insert(0, Finder())\n"
    )
    return subprocess.Popen(
        [sys.executable, "-m", "paddle_recompute", "train", "--config", str(config), *more],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{folder / 'site'}",
            "SLOW_STEPS": "1",
            "PYTHONUNBUFFERED": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(run: subprocess.Popen[str], folder: Path, step: int) -> None:
    deadline = time.monotonic() + 200
    file = folder / "metrics.jsonl"
    while time.monotonic() < deadline and run.poll() is None:
        if file.exists() and len(file.read_text().splitlines()) >= step:
            return
        time.sleep(0.02)
    run.terminate()
    pytest.fail(f"no step {step} of\n{run.communicate(timeout=60)[0][-3000:]}")


def pids_of_ranks(command: int) -> dict[int, int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len(found := ranks_started_by(command)) == 2:
            return found
        time.sleep(0.05)
    pytest.fail("no ranks")


TWO = {"launch__num_ranks": 2, "recompute__enable": False}


def test_one_process_saves_its_step_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = train(tmp_path, write_config(tmp_path, "whole"))
    config = write_config(tmp_path, "run", train__resume="auto")
    run = train(tmp_path, config)
    wait_for_step(run, tmp_path / "run", 3)
    run.send_signal(signal.SIGINT)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 130, output
    assert "Stopped by SIGINT; the steps so far are saved" in output
    assert "Traceback" not in output
    step = find_checkpoint(tmp_path / "run" / "checkpoint").step
    assert 3 <= step < STEPS
    assert train(tmp_path, config).wait(60) == whole.wait(60) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(("whom", "mode"), [("launcher", "dygraph"), ("rank 1", "static")])
def test_a_signal_to_one_saves_on_all_ranks(tmp_path: Path, whom: str, mode: str) -> None:
    config = write_config(tmp_path, "run", train__resume="auto", mode=mode, **TWO)
    run = train(tmp_path, config)
    pids = pids_of_ranks(run.pid)
    wait_for_step(run, tmp_path / "run", 3)
    os.kill(run.pid if whom == "launcher" else pids[int(whom[-1])], signal.SIGTERM)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 143, output
    assert "Stopped by SIGTERM; the steps so far are saved" in output
    assert "Traceback" not in output
    assert 3 <= find_checkpoint(tmp_path / "run" / "checkpoint").step < STEPS


def test_ranks_are_started_again_where_one_was_killed(tmp_path: Path) -> None:
    config = write_config(tmp_path, "run", **TWO, train__save_every=2)
    run = train(tmp_path, config, "--max_restart", "1")
    pids = pids_of_ranks(run.pid)
    wait_for_step(run, tmp_path / "run", 4)
    os.kill(pids[1], signal.SIGKILL)
    output = run.communicate(timeout=120)[0]
    assert run.returncode == 0, output
    assert "Starting again (1 of 1)" in output
    assert "Resuming after step" in output
    assert json.loads(output.strip().splitlines()[-1])["steps"] == STEPS
