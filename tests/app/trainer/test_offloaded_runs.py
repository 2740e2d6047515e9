"""Offloaded and sharded runs on two ranks: the bits of the plain run, also after any kill."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import paddle.distributed as dist
import pytest

from paddle_recompute.app.trainer import Trainer
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.offload._chain import Chain
from paddle_recompute.offload._ranks import OwnedShard
from tests.app.trainer.test_trainer import assert_same_run, tiny, unmeasured, write_pairs
from tests.distributed.mortal_ranks import assert_rank_0_names_killed_rank_1
from tests.ranks import run_ranks

RUN: dict[str, Any] = {
    "launch__num_ranks": 2,
    "train__max_steps": 4,
    "train__save_every": 2,
    "train__eval_before": False,
    "train__eval_batch": 8,  # a number of batches that two ranks cannot share evenly
    "contrastive__learnable_temperature": True,
    "contrastive__chunk_size": 2,
}
ON_RANKS = {"recompute__offload_parameters": "ranks", "recompute__num_shards": 2}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ranks": ON_RANKS,
    "disk": {"recompute__offload_parameters": "disk", "recompute__num_shards": 2},
}
# Where rank 1 is killed: a shard travels; between the backwards of two. And in which call of it.
PLACES: dict[str, tuple[str, type, str, int]] = {
    "a shard is sent": ("ranks", OwnedShard, "load", 3),
    "between two backwards": ("disk", Chain, "note_backward", 1),
}


@unmeasured
def train(folder: str, name: str, way: str, **changes: Any) -> None:
    output = {"train__output_dir": f"{folder}/{name}"}
    Trainer(tiny(Path(folder), **RUN, **output, **WAYS[way], **changes)).run()


def train_and_be_killed(folder: str, place: str) -> None:
    """Rank 1 is killed after step 2 is saved."""
    way, kind, method, fatal = PLACES[place]
    saved = Path(folder) / "run" / "checkpoint" / "step-2"
    sound, calls = getattr(kind, method), []

    def call(*arguments: Any) -> Any:
        if dist.get_rank() == 1 and saved.exists():
            calls.append(arguments)
            if len(calls) == fatal:
                (Path(folder) / "held").write_text("\n".join(files_open_here()))
                os.kill(os.getpid(), signal.SIGKILL)
        return sound(*arguments)

    with (
        mock.patch.object(tempfile, "tempdir", f"{folder}/shards"),
        mock.patch.object(kind, method, call),
    ):
        train(folder, "run", way)


def files_open_here() -> list[str]:
    """Their paths, also of those that were removed, or never had a name."""
    found = []
    for one in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # what lists them is closed
            found.append(os.readlink(f"/proc/self/fd/{one}"))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain run that nobody has killed."""
    folder = tmp_path_factory.mktemp("whole")
    write_pairs(folder / "pairs.tsv")
    run_ranks(train, 2, folder=str(folder), name="plain", way="plain")
    return folder / "plain"


@pytest.mark.parametrize("place", PLACES)
def test_a_run_of_which_a_rank_was_killed_resumes(place: str, whole: Path, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    (tmp_path / "shards").mkdir()
    way = PLACES[place][0]
    assert_rank_0_names_killed_rank_1(train_and_be_killed, folder=str(tmp_path), place=place)
    assert find_checkpoint(tmp_path / "run" / "checkpoint").step == 2
    if way == "disk":  # its shards were files there, without a name that could stay
        assert f"{tmp_path}/shards/" in (tmp_path / "held").read_text()
    assert os.listdir(tmp_path / "shards") == []
    # One goes on as a plain run.
    goes_on = "plain" if place == "a shard is sent" else way
    run_ranks(train, 2, folder=str(tmp_path), name="run", way=goes_on, train__resume=True)
    assert_same_run(tmp_path / "run", whole)
