"""A rank is killed in an offloaded step: no file is left, no finished step is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import paddle.distributed as dist

from paddle_recompute.app.trainer import Trainer
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.offload._chain import Chain
from tests.app.trainer.test_trainer import assert_same_run, tiny, unmeasured, write_pairs
from tests.distributed.mortal_ranks import assert_rank_0_names_killed_rank_1
from tests.ranks import run_ranks

OFFLOADED: dict[str, Any] = {
    "launch__num_ranks": 2,
    "recompute__offload_parameters": "disk",
    "recompute__num_shards": 2,
    "train__max_steps": 4,
    "train__save_every": 2,
    "train__eval_before": False,
}


@unmeasured
def train(folder: str, name: str, **changes: Any) -> None:
    config = tiny(Path(folder), train__output_dir=f"{folder}/{name}", **OFFLOADED, **changes)
    Trainer(config).run()


def train_and_be_killed(folder: str) -> None:
    """After step 2 is saved, rank 1 is killed between the backwards of two shards."""
    sound = Chain.note_backward
    saved = Path(folder) / "run" / "checkpoint" / "step-2"

    def note_backward(self: Chain, index: int) -> None:
        if dist.get_rank() == 1 and saved.exists() and index == 1:
            (Path(folder) / "held").write_text("\n".join(files_open_here()))
            os.kill(os.getpid(), signal.SIGKILL)
        sound(self, index)

    with (
        mock.patch.object(tempfile, "tempdir", f"{folder}/shards"),
        mock.patch.object(Chain, "note_backward", note_backward),
    ):
        train(folder, "run")


def files_open_here() -> list[str]:
    """Their paths, also of those that were removed, or never had a name."""
    found = []
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # what lists them is closed
            found.append(os.readlink(f"/proc/self/fd/{one}"))
    return found


def test_a_killed_rank_leaves_no_file_and_loses_no_step(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    shards = tmp_path / "shards"
    shards.mkdir()
    run_ranks(train, 2, folder=str(tmp_path), name="whole")
    assert_rank_0_names_killed_rank_1(train_and_be_killed, folder=str(tmp_path))
    # The shards were in this folder, and there was no name in it that could stay.
    assert f"{shards}/" in (tmp_path / "held").read_text()
    assert os.listdir(shards) == []
    assert find_checkpoint(tmp_path / "run" / "checkpoint").step == 2
    run_ranks(train, 2, folder=str(tmp_path), name="run", train__resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
