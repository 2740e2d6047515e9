"""A run goes on with the data, the split and the tokenizer that it began with, on all ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import paddle.distributed as dist
import pytest

from paddle_recompute.app.trainer import Trainer
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.checkpoint.manifest import write_manifest
from paddle_recompute.errors import CheckpointError, PaddleRecomputeError
from tests.app.trainer.test_trainer import tiny, unmeasured, write_pairs
from tests.ranks import run_ranks

SHORT = {"train__max_steps": 2, "train__eval_before": False}
LONGER = {**SHORT, "train__max_steps": 3, "train__resume": "auto"}


def swap_two_lines(file: Path) -> None:
    """The same size, and the same pairs, in another order."""
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[1], lines[0], *lines[2:]]))


def test_files_that_were_replaced_are_refused_by_name(folder: Path) -> None:
    write_pairs(folder / "valid.tsv")
    data = tiny(folder).to_dict()["data"]
    del data["valid_pairs"]
    settings = {"data": {**data, "valid_file": str(folder / "valid.tsv")}}
    Trainer(tiny(folder, **SHORT, **settings)).run()
    for name, file in (("train_file", folder / "pairs.tsv"), ("valid_file", folder / "valid.tsv")):
        swap_two_lines(file)
        with pytest.raises(CheckpointError) as caught:
            Trainer(tiny(folder, **LONGER, **settings)).run()
        assert f"data.{name}: {file} is not the file that" in str(caught.value)
        assert "checkpoint/step-2" in str(caught.value)
        assert "train.overwrite=true" in str(caught.value)
        swap_two_lines(file)
    assert Trainer(tiny(folder, **LONGER, **settings)).run()["steps"] == 3


def test_the_same_pairs_may_be_elsewhere(finished: Path) -> None:
    (finished / "pairs.tsv").rename(finished / "moved.tsv")
    moved = tiny(finished, **LONGER, data__train_file=str(finished / "moved.tsv"))
    assert Trainer(moved).run()["steps"] == 3


@pytest.mark.parametrize("change", [{"train__seed": 1}, {"data__valid_pairs": 19}])
def test_another_split_is_refused(change: dict[str, Any], finished: Path) -> None:
    """It would train on pairs that were held out."""
    with pytest.raises(CheckpointError, match=r"train\.seed, data\.valid_pairs: other pairs are"):
        Trainer(tiny(finished, **LONGER, **change)).run()


def test_another_tokenizer_is_refused(finished: Path) -> None:
    file = find_checkpoint(finished / "run" / "checkpoint").tokenizer_file
    (made,) = (finished / "cache").glob("tokenizer-*.json")
    assert file.read_bytes() == made.read_bytes()
    spoil(file)
    write_manifest(file.parent)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not the tokenizer that"):
        Trainer(tiny(finished, **LONGER)).run()


def spoil(file: Path) -> None:
    """Two entries of the vocabulary change places: as large as before, and nothing is missing."""
    tree = json.loads(file.read_text())
    vocabulary = tree["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(tree))


def test_a_checkpoint_without_digests_is_gone_on_with_and_told(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of an earlier version."""
    file = find_checkpoint(finished / "run" / "checkpoint").folder / "state.json"
    state = json.loads(file.read_text())
    del state["data"]
    file.write_text(json.dumps(state))
    write_manifest(file.parent)
    assert Trainer(tiny(finished, **LONGER)).run()["steps"] == 3
    assert "whether they have changed is not known" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- two ranks


@unmeasured
def start_on_ranks(folder: str, **changes: Any) -> str:
    """Each rank reads files of its own; what it says."""
    own = Path(folder) / f"of{dist.get_rank()}"
    files = {"data__train_file": str(own / "pairs.tsv"), "data__cache_dir": str(own / "cache")}
    config = tiny(Path(folder), launch__num_ranks=2, **SHORT, **files, **changes)
    try:
        Trainer(config).run()
    except PaddleRecomputeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_with_other_files_or_tokenizers_are_named(finished: Path) -> None:
    for rank in range(2):
        shutil.copytree(finished / "cache", finished / f"of{rank}" / "cache")
        shutil.copy(finished / "pairs.tsv", finished / f"of{rank}")
    there = {"folder": str(finished), "train__output_dir": str(finished / "on ranks")}
    pairs = finished / "of1" / "pairs.tsv"
    swap_two_lines(pairs)
    for told in run_ranks(start_on_ranks, 2, **there):
        assert told.startswith("DataError: data.train_file: rank 1 reads other pairs")
        assert str(pairs) in told
    swap_two_lines(pairs)
    (vocabulary,) = (finished / "of1" / "cache").glob("tokenizer-*.json")
    sound = vocabulary.read_bytes()
    spoil(vocabulary)
    for told in run_ranks(start_on_ranks, 2, **there):
        assert told.startswith("DataError: tokenizer: rank 1 has another one than rank 0")
        assert str(vocabulary) in told
    vocabulary.write_bytes(sound)
    assert run_ranks(start_on_ranks, 2, **there) == ["", ""]
