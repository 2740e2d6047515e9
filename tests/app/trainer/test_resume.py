"""What a run goes on from: anew or from the newest whole checkpoint, the same on all ranks."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import paddle.distributed as dist
import pytest
from safetensors.numpy import load_file, save_file

from paddle_recompute.app.data import PairLoader
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.app.trainer.checkpoints import RunCheckpoints
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.checkpoint.manifest import write_manifest
from paddle_recompute.errors import CheckpointError, PaddleRecomputeError
from tests.app.trainer.test_trainer import assert_same_run, tiny, unmeasured, write_pairs
from tests.ranks import run_ranks


def test_auto_starts_anew_and_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"train__resume": "auto", "train__save_every": 2}
    Trainer(tiny(folder, train__max_steps=4, train__decay="constant", **settings)).run()
    assert "train.resume: auto: " in capsys.readouterr().out
    Trainer(tiny(folder, train__max_steps=6, train__decay="constant", **settings)).run()
    assert "Resuming after step 4" in capsys.readouterr().out
    whole = tiny(
        folder,
        train__max_steps=6,
        train__decay="constant",
        train__output_dir=str(folder / "whole"),
        **settings,
    )
    Trainer(whole).run()
    assert_same_run(folder / "run", folder / "whole")
    kept = {path.name for path in (folder / "run" / "checkpoint").iterdir()}
    assert kept == {"step-4", "step-6"}


def test_auto_does_not_start_anew_where_all_is_damaged(folder: Path) -> None:
    Trainer(tiny(folder, train__max_steps=2)).run()
    for file in (folder / "run").rglob("state.json"):
        file.write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json: is damaged"):
        Trainer(tiny(folder, train__max_steps=2, train__resume="auto")).run()


def test_damage_is_told_and_the_run_goes_on_from_before(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"train__max_steps": 4, "train__save_every": 2}
    Trainer(tiny(folder, **settings, train__output_dir=str(folder / "whole"))).run()
    Trainer(tiny(folder, **settings)).run()
    file = folder / "run" / "checkpoint" / "step-4" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    Trainer(tiny(folder, **settings, train__resume=True)).run()
    said = capsys.readouterr().out
    assert "optimizer.safetensors: is damaged (its SHA-256" in said
    assert "Resuming after step 2" in said
    assert_same_run(folder / "run", folder / "whole")


def test_moments_without_a_tensor_are_refused(folder: Path) -> None:
    Trainer(tiny(folder, train__max_steps=2)).run()
    checkpoint = find_checkpoint(folder / "run" / "checkpoint").folder
    file = checkpoint / "optimizer.safetensors"
    whole = load_file(file)
    for kept in ({}, dict(list(whole.items())[::2])):
        save_file(kept, file)
        write_manifest(checkpoint)
        with pytest.raises(CheckpointError, match=r"holds no tensor|lacks"):
            Trainer(tiny(folder, train__max_steps=3, train__resume=True)).run()


GOOD_BEST = {"metric": "mrr", "best": 0.3, "best_step": 1, "since": 0}
BAD_STATES: dict[str, Any] = {
    "model is null": {"config": {"model": None}},
    "config is a list": {"config": []},
    "no config": {"config": None},
    "chunks are negative": {"chunks": {"size": -1, "tokens": None}},
    "chunks of words": {"chunks": {"size": "many"}},
    "untrained is a number": {"untrained": 3},
    "figures are text": {"figures": "good"},
    "train_step is a list": {"train_step": []},
    "no ranks": {"world_size": 0},
    "ranks in words": {"world_size": "two"},
    "best in words": {"validation": {**GOOD_BEST, "best": "0.3"}},
    "best is no number": {"validation": {**GOOD_BEST, "best": float("nan")}},
    "no best step": {"validation": {**GOOD_BEST, "best_step": None}},
    "fewer than no evaluations": {"validation": {**GOOD_BEST, "since": -1}},
}


def test_bad_state_is_refused(folder: Path) -> None:
    Trainer(tiny(folder, train__max_steps=1)).run()
    file = find_checkpoint(folder / "run" / "checkpoint").folder / "state.json"
    good = {**json.loads(file.read_text()), "validation": GOOD_BEST}
    for name, change in BAD_STATES.items():
        file.write_text(json.dumps({**good, **change}))
        write_manifest(file.parent)
        with pytest.raises(CheckpointError, match=r"state\.json: is damaged"):
            Trainer(tiny(folder, train__max_steps=2, train__resume=True)).run()
            pytest.fail(name)
    file.write_text(json.dumps(good))
    write_manifest(file.parent)
    assert Trainer(tiny(folder, train__max_steps=2, train__resume=True)).run()["steps"] == 2


# ------------------------------------------------------------------------------------- two ranks


@unmeasured
def train_on_ranks(folder: str, ranks: int, steps: int, **changes: Any) -> Any:
    """What the run says, and which pairs each step had on this rank."""
    seen: list[list[int]] = []
    made = PairLoader.__iter__

    def noted(self: PairLoader) -> Any:
        for batch in made(self):
            seen.append(sorted(batch["index"].numpy().tolist()))
            yield batch

    PairLoader.__iter__ = noted  # type: ignore[method-assign]
    out = io.StringIO()
    config = tiny(
        Path(folder),
        launch__num_ranks=ranks,
        train__max_steps=steps,
        train__resume="auto",
        train__decay="constant",
        train__eval_before=False,
        sync__compression="bf16",
        contrastive__negatives="local",
        **changes,
    )
    try:
        with contextlib.redirect_stdout(out):
            Trainer(config).run()
    except PaddleRecomputeError as error:
        return str(error), seen
    finally:
        PairLoader.__iter__ = made  # type: ignore[method-assign]
    return out.getvalue(), seen


def together(results: list[Any]) -> list[list[int]]:
    """The pairs of each step, over all ranks."""
    by_rank = [seen for _, seen in results]
    return [sorted(itertools.chain(*parts)) for parts in zip(*by_rank, strict=True)]


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on_with_the_same_pairs(
    before: int, now: int, folder: Path
) -> None:
    first = run_some(before, folder, 3)
    said = run_some(now, folder, 5)
    text = said[0][0]
    ranks = {1: "1 rank", 2: "2 ranks"}
    assert f"{ranks[before]} saved it, and {now} go on: each step has the same pairs, but" in text
    assert f"a query meets the {8 // now} pairs of its rank now" in text
    assert ("rounding errors of their gradients" in text) == (before == 2)
    # A run that was not interrupted, on the second number of ranks.
    (folder / "other").mkdir()
    whole = run_some(now, folder, 5, train__output_dir=str(folder / "other"))
    assert len(together(first)) == 3
    assert together(first) + together(said)[3:] == together(whole)
    assert find_checkpoint(folder / "run" / "checkpoint").state["world_size"] == now


def run_some(num_ranks: int, folder: Path, steps: int, **changes: Any) -> list[Any]:
    given = {"folder": str(folder), "ranks": num_ranks, "steps": steps, **changes}
    if num_ranks == 1:
        return [train_on_ranks(**given)]
    return run_ranks(train_on_ranks, num_ranks, **given)


def find_on_ranks(folder: str, resume: Any) -> Any:
    """Each rank looks into a folder of its own."""
    rank = dist.get_rank()
    config = tiny(Path(folder) / f"of{rank}", train__resume=resume, launch__num_ranks=2)
    checkpoints = RunCheckpoints(config, rank, print)
    try:
        found = checkpoints.find()
    except CheckpointError as error:
        return str(error)
    return found.step if found is not None else None


def test_ranks_take_what_all_of_them_can_read(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    config = tiny(
        tmp_path, train__max_steps=4, train__save_every=2, train__output_dir=str(tmp_path / "run")
    )
    Trainer(config).run()
    for rank in range(2):
        shutil.copytree(tmp_path / "run", tmp_path / f"of{rank}" / "run")
    assert run_ranks(find_on_ranks, 2, folder=str(tmp_path), resume=True) == [4, 4]
    (tmp_path / "of1" / "run" / "checkpoint" / "step-4" / "state.json").write_text("{")
    assert run_ranks(find_on_ranks, 2, folder=str(tmp_path), resume=True) == [2, 2]
    shutil.rmtree(tmp_path / "of1" / "run")
    said = run_ranks(find_on_ranks, 2, folder=str(tmp_path), resume="auto")
    assert "rank 1: " in said[0] and said[0].replace("rank 1: ", "") == said[1]
    assert "holds no checkpoint" in said[1]
    shutil.rmtree(tmp_path / "of0" / "run")
    assert run_ranks(find_on_ranks, 2, folder=str(tmp_path), resume="auto") == [None, None]
