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
from paddle_recompute.errors import CheckpointError, DataError, PaddleRecomputeError
from tests.app.trainer.test_trainer import tiny, unmeasured, write_pairs
from tests.ranks import run_ranks

SHORT = {"train__max_steps": 2, "train__eval_before": False}
LONGER = {**SHORT, "train__max_steps": 3, "train__resume": "auto"}


def swap_two_lines(file: Path) -> None:
    """The same size, and the same pairs, in another order."""
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([lines[1], lines[0], *lines[2:]]))


@pytest.mark.parametrize("name", ["train_file", "valid_file"])
def test_a_file_that_was_replaced_is_refused_by_name(name: str, folder: Path) -> None:
    write_pairs(folder / "valid.tsv")
    data = tiny(folder).to_dict()["data"]
    del data["valid_pairs"]
    settings = {"data": {**data, "valid_file": str(folder / "valid.tsv")}}
    Trainer(tiny(folder, **SHORT, **settings)).run()
    file = folder / {"train_file": "pairs.tsv", "valid_file": "valid.tsv"}[name]
    swap_two_lines(file)
    with pytest.raises(CheckpointError) as caught:
        Trainer(tiny(folder, **LONGER, **settings)).run()
    assert f"data.{name}: {file} is not the file that" in str(caught.value)
    assert "checkpoint/step-2" in str(caught.value)
    assert "train.overwrite=true" in str(caught.value)
    swap_two_lines(file)
    assert Trainer(tiny(folder, **LONGER, **settings)).run()["steps"] == 3


def test_the_same_pairs_may_be_elsewhere(folder: Path) -> None:
    Trainer(tiny(folder, **SHORT)).run()
    (folder / "pairs.tsv").rename(folder / "moved.tsv")
    moved = tiny(folder, **LONGER, data__train_file=str(folder / "moved.tsv"))
    assert Trainer(moved).run()["steps"] == 3


@pytest.mark.parametrize("change", [{"train__seed": 1}, {"data__valid_pairs": 19}])
def test_another_split_is_refused(change: dict[str, Any], folder: Path) -> None:
    """It would train on pairs that were held out."""
    Trainer(tiny(folder, **SHORT)).run()
    with pytest.raises(CheckpointError, match=r"train\.seed, data\.valid_pairs: other pairs are"):
        Trainer(tiny(folder, **LONGER, **change)).run()


def test_another_tokenizer_is_refused(folder: Path) -> None:
    Trainer(tiny(folder, **SHORT)).run()
    file = find_checkpoint(folder / "run" / "checkpoint").tokenizer_file
    (made,) = (folder / "cache").glob("tokenizer-*.json")
    assert file.read_bytes() == made.read_bytes()
    spoil(file)
    write_manifest(file.parent)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not the tokenizer that"):
        Trainer(tiny(folder, **LONGER)).run()


def spoil(file: Path) -> None:
    """Two entries of the vocabulary change places: as large as before, and nothing is missing."""
    tree = json.loads(file.read_text())
    vocabulary = tree["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(tree))


def test_a_checkpoint_without_digests_is_gone_on_with_and_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of an earlier version."""
    Trainer(tiny(folder, **SHORT)).run()
    file = find_checkpoint(folder / "run" / "checkpoint").folder / "state.json"
    state = json.loads(file.read_text())
    del state["data"]
    file.write_text(json.dumps(state))
    write_manifest(file.parent)
    assert Trainer(tiny(folder, **LONGER)).run()["steps"] == 3
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


def test_ranks_with_other_files_or_tokenizers_are_named(folder: Path) -> None:
    Trainer(tiny(folder, **SHORT, train__output_dir=str(folder / "alone"))).run()
    for rank in range(2):
        shutil.copytree(folder / "cache", folder / f"of{rank}" / "cache")
        shutil.copy(folder / "pairs.tsv", folder / f"of{rank}")
    swap_two_lines(folder / "of1" / "pairs.tsv")
    for told in run_ranks(start_on_ranks, 2, folder=str(folder)):
        assert told.startswith(f"{DataError.__name__}: data.train_file: rank 1 reads other pairs")
        assert f"{folder}/of1/pairs.tsv" in told
    swap_two_lines(folder / "of1" / "pairs.tsv")
    (vocabulary,) = (folder / "of1" / "cache").glob("tokenizer-*.json")
    spoil(vocabulary)
    for told in run_ranks(start_on_ranks, 2, folder=str(folder)):
        assert told.startswith("DataError: tokenizer: rank 1 has another one than rank 0")
        assert str(vocabulary) in told
    shutil.copy(next((folder / "of0" / "cache").glob("tokenizer-*.json")), vocabulary)
    assert run_ranks(start_on_ranks, 2, folder=str(folder)) == ["", ""]
