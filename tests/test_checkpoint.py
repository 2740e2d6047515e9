"""Complete or absent, and for the right model only."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddle_recompute.checkpoint import Checkpoint, find_checkpoint, save_checkpoint, saving
from paddle_recompute.checkpoint.manifest import write_manifest
from paddle_recompute.errors import CheckpointError
from paddle_recompute.train_step.optimizer_state import set_state_of, state_of


def write_tokenizer(path: Path) -> None:
    path.write_text("{}")


def trained(size: int = 4, steps: int = 2) -> tuple[paddle.nn.Layer, paddle.optimizer.AdamW]:
    """A model and an optimizer that made `steps` steps."""
    paddle.seed(0)
    model = paddle.nn.Sequential(paddle.nn.Linear(size, size), paddle.nn.LayerNorm(size))
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: paddle.nn.Layer, optimizer: paddle.optimizer.AdamW) -> None:
    size = model[0].weight.shape[0]
    model(paddle.arange(size, dtype="float32").reshape([1, size])).square().sum().backward()
    optimizer.step()
    optimizer.clear_grad()


def save(folder: Path, number: int, **others: Any) -> Checkpoint:
    model, optimizer = others.pop("trained", None) or trained()
    of_ranks = {
        key: others.pop(key) for key in ("rank", "sync_state", "barrier", "keep") if key in others
    }
    return save_checkpoint(
        folder,
        model=model,
        optimizer_state=state_of(optimizer, dict(model.named_parameters())),
        save_tokenizer=others.pop("save_tokenizer", write_tokenizer),
        state={"step": number, **others},
        **of_ranks,
    )


def load(checkpoint: Checkpoint, model: paddle.nn.Layer, optimizer: paddle.optimizer.AdamW) -> None:
    checkpoint.load_into(model)
    parameters = dict(model.named_parameters())
    set_state_of(optimizer, parameters, checkpoint.optimizer_state())


def test_round_trip_continues_to_the_same_bits(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path, 2, trained=(model, optimizer), note="汉")
    other, fresh = trained(steps=0)
    other[0].weight.set_value(paddle.zeros([4, 4]))
    checkpoint = find_checkpoint(tmp_path)
    assert (checkpoint.step, checkpoint.state["note"]) == (2, "汉")
    load(checkpoint, other, fresh)
    for _ in range(3):
        step(model, optimizer)
        step(other, fresh)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())


def test_the_newest_stay_by_number_and_what_is_no_checkpoint_stays(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"set train.resume: false"):
        find_checkpoint(tmp_path / "absent")
    (tmp_path / ".unfinished-killed").mkdir()
    (tmp_path / "step-notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    for number in range(7, 12):
        save(tmp_path, number, keep=3)
    assert find_checkpoint(tmp_path).step == 11
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {"step-9", "step-10", "step-11", "step-notes.txt"}
    save(tmp_path, 10, keep=3, note="new")  # 11 is of an earlier run then
    assert {path.name for path in tmp_path.glob("step-1*")} == {"step-10"}
    assert find_checkpoint(tmp_path).state["note"] == "new"


def test_interrupted_save_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def full_disk(path: Path) -> None:
        raise OSError("No space left on device")

    with pytest.raises(CheckpointError, match=r"step-2: cannot be written \(No space left"):
        save(tmp_path, 2, save_tokenizer=full_disk)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert find_checkpoint(tmp_path).step == 1


@pytest.mark.parametrize(
    ("moments", "words"),
    [
        ({"7.weight:moment1": np.zeros(1)}, r"holds 7\.weight:moment1, and the model has no 7"),
        ({"0.weight:moment1": np.zeros([4, 5])}, r"0\.weight:moment1 of the shape \[4, 5\]"),
    ],
)
def test_moments_of_another_model(tmp_path: Path, moments: dict[str, Any], words: str) -> None:
    checkpoint = save(tmp_path, 1)
    file = checkpoint.folder / "optimizer.safetensors"
    save_file({**load_file(file), **moments}, file)
    with pytest.raises(CheckpointError, match=words):
        load(checkpoint, *trained(steps=0))


def save_on_two_ranks(folder: Path, number: int) -> None:
    """Both in this process: each comes to its barriers when the other is there."""
    meeting = threading.Barrier(2, timeout=30)

    def save_of(rank: int) -> None:
        own = {"residuals": {"0.weight": np.full([2], rank, "float32")}}
        save(folder, number, rank=rank, sync_state=own, barrier=meeting.wait)

    with concurrent.futures.ThreadPoolExecutor() as ranks:
        list(ranks.map(save_of, range(2)))


def test_every_rank_gets_its_own_back(tmp_path: Path) -> None:
    assert not save(tmp_path, 1).has_sync_states
    for number in (2, 3):
        save_on_two_ranks(tmp_path, number)
    checkpoint = find_checkpoint(tmp_path)
    assert checkpoint.step == 3 and checkpoint.has_sync_states
    for rank in range(2):
        own = checkpoint.sync_state(rank)["residuals"]["0.weight"]
        np.testing.assert_array_equal(own, [rank, rank])
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    assert (checkpoint.folder / "sync_rank1.safetensors").stat().st_mode & 0o777 == 0o644


def test_rank_0_waits_for_the_files_of_the_others(tmp_path: Path) -> None:
    barriers = iter([None, tmp_path / ".unfinished-step-1" / "sync_rank1.safetensors"])

    def barrier() -> None:
        """At the first one the folder is there, before the second one rank 1 writes into it."""
        assert (tmp_path / ".unfinished-step-1").is_dir()
        if (file := next(barriers)) is not None:
            file.write_bytes(b"of rank 1")

    checkpoint = save(tmp_path, 1, sync_state={"residuals": {}}, barrier=barrier)
    own, other = (checkpoint.folder / f"sync_rank{rank}.safetensors" for rank in range(2))
    assert own.exists() and other.read_bytes() == b"of rank 1"
    for content in (b"", b"no pickle", None):
        own.unlink() if content is None else own.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"sync_rank0\.safetensors: cannot be read"):
            checkpoint.sync_state(0)


def test_rank_that_does_not_see_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1 does not see .*on a disk that all machines"):
        save(tmp_path / "elsewhere", 1, rank=1, sync_state={"residuals": {}}, barrier=int)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_files_are_named_by_structure(tmp_path: Path) -> None:
    """So that a process that built other layers first can read them."""
    paddle.nn.Linear(1, 1)
    folder = save(tmp_path, 1).folder
    moments = set(load_file(folder / "optimizer.safetensors"))
    assert {"0.weight:moment1", "1.bias:moment2"} <= moments
    assert set(load_file(folder / "model.safetensors")) == {
        f"{layer}.{kind}" for layer in "01" for kind in ("weight", "bias")
    }
    state = json.loads((folder / "state.json").read_text())
    assert state == {"step": 1}
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


# ------------------------------------------------------------------------- damage and fallback


FILES = ["model.safetensors", "optimizer.safetensors", "tokenizer.json", "state.json"]


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_one_flipped_bit_is_told_and_the_checkpoint_before_is_used(
    tmp_path: Path, name: str
) -> None:
    save(tmp_path, 1)
    file = save(tmp_path, 2, keep=2).folder / name
    whole = file.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 30)):
        content = bytearray(whole)
        content[place] ^= 1
        file.write_bytes(content)
        told: list[str] = []
        found = find_checkpoint(tmp_path, tell=told.append)
        if name == "manifest.json" and found.step == 2:
            continue  # a space of the list, say, which means nothing
        assert found.step == 1, place
        assert str(file.parent) in told[0] and "is used: step-1" in told[0]
    file.write_bytes(whole)
    assert find_checkpoint(tmp_path).step == 2


def test_a_missing_file_is_damage_too(tmp_path: Path) -> None:
    folders = [save(tmp_path, number, keep=3).folder for number in (1, 2, 3)]
    (folders[2] / "optimizer.safetensors").unlink()
    (folders[1] / "manifest.json").unlink()
    (folders[0] / "state.json").write_text("{")
    told = r"step-3/optimizer\.safetensors: is missing, and manifest.*are damaged too\); put"
    with pytest.raises(CheckpointError, match=told):
        find_checkpoint(tmp_path)


STATES = {
    "step is infinite": '{"step": Infinity}',
    "step is negative": '{"step": -1}',
    "step is true": '{"step": true}',
    "step has 5,000 digits": '{"step": 1' + "0" * 5000 + "}",
    "step is 2**63": '{"step": 9223372036854775808}',
    "nested 100,000 deep": '{"step": 1, "a": ' + "[" * 100_000,
    "not UTF-8": '{"step": 1, "a": "\udc80"}',
    "a list": "[1]",
    "no step": '{"note": 1}',
}


@pytest.mark.parametrize("name", STATES)
def test_bad_state_is_told_within_a_second(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1).folder
    file = folder / "state.json"
    file.write_text(STATES[name], encoding="utf-8", errors="surrogateescape")
    write_manifest(folder)  # its writer has listed what it wrote
    began = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"state\.json: is damaged"):
        find_checkpoint(tmp_path)
    assert time.perf_counter() - began < 1


# ----------------------------------------------------------------------- kills while it is saved


def kill_points(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Save step 2 again, and die at the `number`-th operation on files."""
    counter = iter(range(number))

    def or_die(operation: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            if next(counter, None) is None:
                os._exit(9)
            return operation(*arguments, **named)

        return counted

    monkeypatch.setattr(Path, "rename", or_die(Path.rename))
    monkeypatch.setattr(Path, "write_text", or_die(Path.write_text))
    monkeypatch.setattr(saving, "save_weights", or_die(saving.save_weights))
    monkeypatch.setattr(saving, "save_file", or_die(saving.save_file))
    monkeypatch.setattr(shutil, "rmtree", or_die(shutil.rmtree))
    save(folder, 2, note="new")


@pytest.mark.parametrize("number", range(12))
def test_a_kill_at_any_moment_of_saving_a_step_again_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    save(tmp_path, 2, note="old")
    child = os.fork()
    if child == 0:
        try:
            kill_points(tmp_path, monkeypatch, number)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    found = find_checkpoint(tmp_path)
    assert found.step == 2 and found.state["note"] in ("old", "new")
    save(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    assert find_checkpoint(tmp_path).step == 3


def test_a_complete_unfinished_folder_is_found_again(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, keep=2).folder.rename(tmp_path / ".unfinished-step-2")
    assert find_checkpoint(tmp_path).step == 2
    save(tmp_path, 3, keep=3)
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2", "step-3"}


def test_a_checkpoint_of_before_0_1_0_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "step-7"
    folder.mkdir()
    paddle.save(trained()[0].state_dict(), str(folder / "model.pdparams"))
    (folder / "state.json").write_text('{"step": 7}')
    with pytest.raises(CheckpointError, match=r"set model\.init_from: .*model\.pdparams"):
        find_checkpoint(tmp_path)
