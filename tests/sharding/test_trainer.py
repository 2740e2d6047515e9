"""``strategy.sharding: true`` in the trainer: the same run, whatever happens to a rank."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import paddle
import paddle.distributed as dist

from paddle_recompute.app.trainer import Trainer
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.distributed import gathered
from paddle_recompute.sharding import _all_gather
from tests.app.trainer.test_trainer import assert_same_run, tiny, unmeasured, write_pairs
from tests.distributed.mortal_ranks import assert_rank_0_names_killed_rank_1
from tests.ranks import run_ranks

RUN: dict[str, Any] = {
    "launch__num_ranks": 2,
    "train__max_steps": 4,
    "train__save_every": 2,
    "train__eval_before": False,
    "train__measure_plain": False,
    "contrastive__learnable_temperature": True,
}


@unmeasured
def train(folder: str, name: str, sharded: bool = True, **changes: Any) -> None:
    output = {"train__output_dir": f"{folder}/{name}", "strategy__sharding": sharded}
    Trainer(tiny(Path(folder), **RUN, **output, **changes)).run()


def train_and_be_killed(folder: str, place: str) -> None:
    """Rank 1 is killed after step 2 is saved: in the second of the sends of an update, or of the
    tensors of the next checkpoint.
    """
    saved = Path(folder) / "run" / "checkpoint" / "step-2"
    sound = dist.broadcast
    calls = []
    running = _all_gather._carry.__globals__ if place == "update" else gathered.__globals__

    def broadcast(tensor: paddle.Tensor, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1 and saved.exists():
            calls.append(tensor.shape)
            if len(calls) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return sound(tensor, *args, **kwargs)

    patched = mock.MagicMock(wraps=dist)
    patched.broadcast = broadcast
    with mock.patch.dict(running, {"dist": patched}):
        train(folder, "run")


def test_the_trainer_has_the_bits_of_the_replicated_run_and_resumes(tmp_path: Path) -> None:
    folder = str(tmp_path)
    write_pairs(tmp_path / "pairs.tsv")
    run_ranks(train, 2, folder=folder, name="plain", sharded=False)
    run_ranks(train, 2, folder=folder, name="sharded")
    assert_same_run(tmp_path / "sharded", tmp_path / "plain")
    for place in ("update", "checkpoint"):
        assert_rank_0_names_killed_rank_1(train_and_be_killed, folder=folder, place=place)
        checkpoint = find_checkpoint(tmp_path / "run" / "checkpoint")
        assert checkpoint.step == 2
        assert os.listdir(checkpoint.folder.parent) == ["step-2"]
        # A replicated run goes on from a sharded one and the other way around.
        is_sharded = place == "update"
        changes = {"train__resume": True}
        run_ranks(train, 2, folder=folder, name="run", sharded=is_sharded, **changes)
        assert_same_run(tmp_path / "run", tmp_path / "plain")
        shutil.rmtree(tmp_path / "run")
