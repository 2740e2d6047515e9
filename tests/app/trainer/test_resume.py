"""What a run goes on from: anew or from the newest whole checkpoint, the same on all ranks.

And with which data, split and tokenizer: those that it began with.
"""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import paddle.distributed as dist
import pytest
from safetensors.numpy import load_file, save_file

from paddle_recompute.app.trainer import Trainer
from paddle_recompute.app.trainer.resume import Resume
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.checkpoint.manifest import write_manifest
from paddle_recompute.errors import CheckpointError, PaddleRecomputeError
from tests.app.trainer.test_trainer import assert_same_run, tiny, unmeasured, write_pairs
from tests.ranks import run_ranks

SHORT = {"train__max_steps": 2, "train__eval_before": False}
LONGER = {**SHORT, "train__max_steps": 3, "train__resume": True}


def test_damage_is_told_and_the_run_goes_on_from_before(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train__max_steps": 6, "train__save_every": 2, "train__resume": "auto"}
    Trainer(tiny(folder, **settings)).run()
    assert "train.resume: auto: " in capsys.readouterr().out  # it starts anew
    shutil.copytree(folder / "run", folder / "whole")
    file = folder / "run" / "checkpoint" / "step-6" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    Trainer(tiny(folder, **settings)).run()
    said = capsys.readouterr().out
    assert "optimizer.safetensors: is damaged (its SHA-256" in said
    assert "Resuming after step 4" in said
    assert_same_run(folder / "run", folder / "whole")
    kept = {path.name for path in (folder / "run" / "checkpoint").iterdir()}
    assert kept == {"step-4", "step-6"}
    for state in (folder / "run").rglob("state.json"):
        state.write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json: is damaged"):
        Trainer(tiny(folder, **settings)).run()


def test_moments_without_a_tensor_and_another_tokenizer_are_refused(finished: Path) -> None:
    checkpoint = find_checkpoint(finished / "run" / "checkpoint").folder
    file = checkpoint / "optimizer.safetensors"
    whole = load_file(file)
    for kept in ({}, dict(list(whole.items())[::2])):
        save_file(kept, file)
        write_manifest(checkpoint)
        with pytest.raises(CheckpointError, match=r"holds no tensor|lacks"):
            Trainer(tiny(finished, **LONGER)).run()
    save_file(whole, file)
    tokenizer = checkpoint / "tokenizer.json"
    (made,) = (finished / "cache").glob("tokenizer-*.json")
    assert tokenizer.read_bytes() == made.read_bytes()
    spoil(tokenizer)
    write_manifest(checkpoint)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not the tokenizer that"):
        Trainer(tiny(finished, **LONGER)).run()


def spoil(file: Path) -> None:
    """Two entries of the vocabulary change places: as large as before, and nothing is missing."""
    tree = json.loads(file.read_text())
    vocabulary = tree["model"]["vocab"]
    one, other = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(tree))


OTHER_SPLIT = r"train\.seed, data\.valid_pairs: other pairs are"  # some were held out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model__num_layers": 1}, r"another model: model\.num_layers was 2, is 1"),
        (
            {"contrastive__learnable_temperature": True},
            r"contrastive\.learnable_temperature: false, and",
        ),
        ({"train__seed": 1}, OTHER_SPLIT),
        ({"data__valid_pairs": 19}, OTHER_SPLIT),
    ],
)
def test_a_run_does_not_go_on_as_another(
    change: dict[str, Any], words: str, finished: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        Trainer(tiny(finished, **LONGER, **change)).run()


GOOD_BEST = {"metric": "mrr", "best": 0.3, "best_step": 1, "since": 0}
BAD_STATES: dict[str, Any] = {
    "model is null": {"config": {"model": None}},
    "chunks are negative": {"chunks": {"size": -1, "tokens": None}},
    "figures are text": {"figures": "good"},
    "best is no number": {"validation": {**GOOD_BEST, "best": float("nan")}},
}


def test_bad_state_is_refused(finished: Path) -> None:
    file = find_checkpoint(finished / "run" / "checkpoint").folder / "state.json"
    good = {**json.loads(file.read_text()), "validation": GOOD_BEST}
    resume = Resume(tiny(finished, train__resume=True), 0, print)
    for name, change in BAD_STATES.items():
        file.write_text(json.dumps({**good, **change}))
        write_manifest(file.parent)
        with pytest.raises(CheckpointError, match=r"state\.json: is damaged"):
            resume.find()
            pytest.fail(name)
    file.write_text(json.dumps(good))
    write_manifest(file.parent)
    found = resume.find()
    assert found is not None and found.step == 2


# ------------------------------------------------------------------------------------- two ranks


def find_on_ranks(folder: str, resume: Any) -> tuple[Any, str]:
    """Each rank looks into a folder of its own; what it takes, and what it says."""
    rank = dist.get_rank()
    config = tiny(Path(folder) / f"of{rank}", train__resume=resume, launch__num_ranks=2)
    said: list[str] = []
    try:
        found = Resume(config, rank, said.append).find()
    except CheckpointError as error:
        return "refused", str(error)
    return found and found.step, "\n".join(said)


def test_ranks_take_the_newest_checkpoint_that_all_of_them_have(finished: Path) -> None:
    Trainer(tiny(finished, train__max_steps=4, train__resume=True)).run()
    for rank in range(2):
        shutil.copytree(finished / "run", finished / f"of{rank}" / "run")
    there = {"folder": str(finished)}

    def found(resume: Any) -> list[tuple[Any, str]]:
        return run_ranks(find_on_ranks, 2, **there, resume=resume)

    host = socket.gethostname()
    for taken, said in found(True):
        assert taken == 4 and "all ranks go on" not in said
    other = finished / "of1" / "run" / "checkpoint"
    (other / "step-4" / "state.json").write_text("{")
    shutil.copytree(other / "step-4", finished / "damaged")
    for _ in range(2):  # a damaged checkpoint, then none
        for taken, said in found(True):
            assert taken == 2
            assert f"step 4 on rank 0 ({host}), step 2 on rank 1 ({host}); all ranks go on" in said
            assert "go on from step 2. To go on from a later one" in said
        shutil.rmtree(other / "step-4", ignore_errors=True)
    shutil.rmtree(finished / "of0" / "run" / "checkpoint" / "step-2")
    for taken, said in found("auto"):
        assert taken == "refused"
        assert f"the newest are step 4 on rank 0 ({host}), step 2 on rank 1 ({host}). " in said
    shutil.rmtree(other)
    for taken, said in found("auto"):
        assert taken == "refused"
        assert "no checkpoint is on all ranks" in said and "train.resume" not in said
        assert f"the newest are step 4 on rank 0 ({host}), none on rank 1 ({host}). " in said
        assert "copy its folder to this place on the other machines" in said
    shutil.copytree(finished / "damaged", other / "step-4")
    for taken, said in found("auto"):
        assert taken == "refused" and "state.json: is damaged" in said
    shutil.rmtree(finished / "of0" / "run")
    shutil.rmtree(finished / "of1" / "run")
    assert [taken for taken, _ in found("auto")] == [None, None]
    for taken, said in found(True):
        assert taken == "refused" and "holds no checkpoint to resume from" in said


# ------------------------------------------------------------------------------------ the same data


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


def test_the_same_pairs_may_be_elsewhere_and_a_checkpoint_may_have_no_digests(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of an earlier version."""
    (finished / "pairs.tsv").rename(finished / "moved.tsv")
    moved = {**LONGER, "data__train_file": str(finished / "moved.tsv")}
    moved["data__cache_dir"] = str(finished / "empty")  # the checkpoint has the vocabulary
    before = find_checkpoint(finished / "run" / "checkpoint").tokenizer_file.read_bytes()
    assert Trainer(tiny(finished, **moved)).run()["steps"] == 3
    after = find_checkpoint(finished / "run" / "checkpoint")
    assert (after.step, after.tokenizer_file.read_bytes()) == (3, before)
    told = "whether they have changed is not known"
    assert told not in capsys.readouterr().out
    file = find_checkpoint(finished / "run" / "checkpoint").folder / "state.json"
    state = json.loads(file.read_text())
    del state["data"]
    file.write_text(json.dumps(state))
    write_manifest(file.parent)
    assert Trainer(tiny(finished, **{**moved, "train__max_steps": 4})).run()["steps"] == 4
    assert told in capsys.readouterr().out


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


@pytest.mark.parametrize(("size", "steps", "is_old"), [(16, 3 + 2 + 3, True), (4, 25, False)])
def test_another_batch_counts_pairs_and_not_old_steps(
    size: int, steps: int, is_old: bool, finished: Path
) -> None:
    """Of 56 pairs, 24 are trained on in batches of 8; two epochs train on all of them twice.

    In batches of 4 these are 3 + 8 + 14 steps.
    """
    shutil.rmtree(finished / "run")
    usual = {"train__num_epochs": 2, "train__eval_before": False}
    Trainer(tiny(finished, **usual, train__max_steps=3)).run()
    if is_old:  # without the place in the pairs
        checkpoint = find_checkpoint(finished / "run" / "checkpoint").folder
        state = json.loads((checkpoint / "state.json").read_text())
        assert state.pop("position") == {"epoch": 0, "taken": [[8, 3]]}
        (checkpoint / "state.json").write_text(json.dumps(state))
        write_manifest(checkpoint)
    changes = {"train__max_steps": None, "train__resume": True, "contrastive__global_batch": size}
    record = Trainer(tiny(finished, **usual, **changes)).run()
    assert record["steps"] == steps
