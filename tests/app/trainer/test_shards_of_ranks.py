"""``recompute.offload_parameters: ranks`` in the trainer: the same run, whatever happens."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import paddle.distributed as dist
import pytest

from paddle_recompute.app.trainer import Trainer
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.offload._ranks import OwnedShard
from tests.app.trainer.test_trainer import assert_same_run, tiny, unmeasured, write_pairs
from tests.distributed.mortal_ranks import assert_rank_0_names_killed_rank_1
from tests.ranks import run_ranks

RUN: dict[str, Any] = {
    "launch__num_ranks": 2,
    "train__max_steps": 4,
    "train__save_every": 2,
    "train__eval_batch": 8,  # a number of batches that two ranks cannot share evenly
    "contrastive__learnable_temperature": True,
    "contrastive__chunk_size": 2,
}
ON_RANKS = {"recompute__offload_parameters": "ranks", "recompute__num_shards": 2}


@unmeasured
def train(folder: str, name: str, on_ranks: bool = True, **changes: Any) -> None:
    where = {"train__output_dir": f"{folder}/{name}", **(ON_RANKS if on_ranks else {})}
    Trainer(tiny(Path(folder), **RUN, **where, **changes)).run()


def train_and_be_killed(folder: str, place: str) -> None:
    """Rank 1 is killed after step 2 is saved: where a shard, or a parameter for the checkpoint,
    travels.
    """
    saved = Path(folder) / "run" / "checkpoint" / "step-2"
    calls = []

    def killing(sound: Any) -> Any:
        def call(*args: Any) -> Any:
            if dist.get_rank() == 1 and saved.exists():
                calls.append(args)
                if len(calls) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            return sound(*args)

        return call

    with mock.patch.object(OwnedShard, place, killing(getattr(OwnedShard, place))):
        train(folder, "run")


def train_both(folder: str) -> None:
    train(folder, "plain", on_ranks=False)
    train(folder, "spread")


def resume_both(folder: str) -> None:
    """The run as it was, and as a plain one."""
    train(folder, "run", train__resume=True)
    train(folder, "unspread", on_ranks=False, train__resume=True)


@pytest.mark.parametrize("place", ["bring", pytest.param("fetch", marks=pytest.mark.matrix)])
def test_the_trainer_has_the_bits_of_the_plain_run_and_resumes(place: str, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    run_ranks(train_both, 2, folder=str(tmp_path))
    assert_same_run(tmp_path / "spread", tmp_path / "plain")
    assert_rank_0_names_killed_rank_1(train_and_be_killed, folder=str(tmp_path), place=place)
    assert find_checkpoint(tmp_path / "run" / "checkpoint").step == 2
    shutil.copytree(tmp_path / "run", tmp_path / "unspread")
    run_ranks(resume_both, 2, folder=str(tmp_path))
    assert_same_run(tmp_path / "unspread", tmp_path / "plain")
    assert_same_run(tmp_path / "run", tmp_path / "plain")
