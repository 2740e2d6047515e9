"""What a run goes on from: anew or from the newest whole checkpoint, the same on all ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import paddle.distributed as dist
import pytest
from safetensors.numpy import load_file, save_file

from paddle_recompute.app.trainer import Trainer
from paddle_recompute.app.trainer.checkpoints import RunCheckpoints
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.checkpoint.manifest import write_manifest
from paddle_recompute.errors import CheckpointError
from tests.app.trainer.test_trainer import assert_same_run, tiny
from tests.ranks import run_ranks


def test_auto_starts_anew_and_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"train__resume": "auto", "train__save_every": 2}
    for steps, said in ((4, "train.resume: auto: "), (6, "Resuming after step 4")):
        Trainer(tiny(folder, train__max_steps=steps, **settings)).run()
        assert said in capsys.readouterr().out
    kept = {path.name for path in (folder / "run" / "checkpoint").iterdir()}
    assert kept == {"step-4", "step-6"}


def test_damage_is_told_and_the_run_goes_on_from_before(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train__max_steps": 4, "train__save_every": 2}
    Trainer(tiny(folder, **settings)).run()
    shutil.copytree(folder / "run", folder / "whole")
    file = folder / "run" / "checkpoint" / "step-4" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    Trainer(tiny(folder, **settings, train__resume=True)).run()
    said = capsys.readouterr().out
    assert "optimizer.safetensors: is damaged (its SHA-256" in said
    assert "Resuming after step 2" in said
    assert_same_run(folder / "run", folder / "whole")
    for state in (folder / "run").rglob("state.json"):
        state.write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json: is damaged"):
        Trainer(tiny(folder, **settings, train__resume="auto")).run()


def test_moments_without_a_tensor_are_refused(finished: Path) -> None:
    checkpoint = find_checkpoint(finished / "run" / "checkpoint").folder
    file = checkpoint / "optimizer.safetensors"
    whole = load_file(file)
    for kept in ({}, dict(list(whole.items())[::2])):
        save_file(kept, file)
        write_manifest(checkpoint)
        with pytest.raises(CheckpointError, match=r"holds no tensor|lacks"):
            Trainer(tiny(finished, train__max_steps=3, train__resume=True)).run()


def test_learnable_temperature_must_stay_what_it_was(finished: Path) -> None:
    learned = {"contrastive__learnable_temperature": True}
    with pytest.raises(CheckpointError, match=r"contrastive\.learnable_temperature: false, and"):
        Trainer(tiny(finished, train__max_steps=3, train__resume=True, **learned)).run()


GOOD_BEST = {"metric": "mrr", "best": 0.3, "best_step": 1, "since": 0}
BAD_STATES: dict[str, Any] = {
    "model is null": {"config": {"model": None}},
    "config is a list": {"config": []},
    "chunks are negative": {"chunks": {"size": -1, "tokens": None}},
    "figures are text": {"figures": "good"},
    "no ranks": {"world_size": 0},
    "best is no number": {"validation": {**GOOD_BEST, "best": float("nan")}},
    "fewer than no evaluations": {"validation": {**GOOD_BEST, "since": -1}},
}


def test_bad_state_is_refused(finished: Path) -> None:
    file = find_checkpoint(finished / "run" / "checkpoint").folder / "state.json"
    good = {**json.loads(file.read_text()), "validation": GOOD_BEST}
    checkpoints = RunCheckpoints(tiny(finished, train__resume=True), 0, print)
    for name, change in BAD_STATES.items():
        file.write_text(json.dumps({**good, **change}))
        write_manifest(file.parent)
        with pytest.raises(CheckpointError, match=r"state\.json: is damaged"):
            checkpoints.find()
            pytest.fail(name)
    file.write_text(json.dumps(good))
    write_manifest(file.parent)
    found = checkpoints.find()
    assert found is not None and found.step == 2


# ------------------------------------------------------------------------------------- two ranks


def find_on_ranks(folder: str, resume: Any) -> Any:
    """Each rank looks into a folder of its own."""
    rank = dist.get_rank()
    config = tiny(Path(folder) / f"of{rank}", train__resume=resume, launch__num_ranks=2)
    try:
        found = RunCheckpoints(config, rank, print).find()
    except CheckpointError as error:
        return str(error)
    return found.step if found is not None else None


def test_ranks_take_what_all_of_them_can_read(finished: Path) -> None:
    Trainer(tiny(finished, train__max_steps=4, train__resume=True)).run()
    for rank in range(2):
        shutil.copytree(finished / "run", finished / f"of{rank}" / "run")
    there = {"folder": str(finished)}
    assert run_ranks(find_on_ranks, 2, **there, resume=True) == [4, 4]
    (finished / "of1" / "run" / "checkpoint" / "step-4" / "state.json").write_text("{")
    assert run_ranks(find_on_ranks, 2, **there, resume=True) == [2, 2]
    shutil.rmtree(finished / "of1" / "run")
    said = run_ranks(find_on_ranks, 2, **there, resume="auto")
    assert "rank 1: " in said[0] and said[0].replace("rank 1: ", "") == said[1]
    assert "holds no checkpoint" in said[1]
    shutil.rmtree(finished / "of0" / "run")
    assert run_ranks(find_on_ranks, 2, **there, resume="auto") == [None, None]
