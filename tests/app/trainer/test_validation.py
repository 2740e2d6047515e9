"""`train.eval_every`: the best checkpoint, early stopping, and both after an interruption."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle.distributed as dist
import pytest

from paddle_recompute.app.report import read_metrics, write_report
from paddle_recompute.app.retrieval import load_encoder, retrieval_metrics
from paddle_recompute.app.trainer import Trainer, evaluation
from paddle_recompute.app.trainer.evaluation import Evaluation
from paddle_recompute.checkpoint import find_checkpoint
from tests.app.trainer.test_trainer import (
    Interrupted,
    assert_same_run,
    interrupt_in_step,
    tiny,
    unmeasured,
    weights_of,
)
from tests.ranks import run_ranks

EVERY_2 = {"train__eval_every": 2, "train__eval_before": False, "train__decay": "constant"}


def valid_of(run: Path) -> dict[int, dict[str, float]]:
    return {one["step"]: one["valid"] for one in read_metrics(run / "metrics.jsonl")
            if "valid" in one}  # fmt: skip


def test_the_best_checkpoint_is_kept_and_training_is_as_without(folder: Path) -> None:
    without = {**EVERY_2, "train__eval_every": None, "train__output_dir": str(folder / "without")}
    Trainer(tiny(folder, train__max_steps=9, **without)).run()
    record = Trainer(tiny(folder, train__max_steps=9, train__log_every=3, **EVERY_2)).run()
    left, right = weights_of(folder / "run"), weights_of(folder / "without")
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name])
    valid = valid_of(folder / "run")
    assert [*valid] == [2, 4, 6, 8, 9]
    assert [one["step"] for one in read_metrics(folder / "run" / "metrics.jsonl")] == [
        2, 3, 4, 6, 8, 9
    ]  # fmt: skip
    values = {step: one["mrr"] for step, one in valid.items()}
    assert record["best_mrr"] == max(values.values())
    assert record["best_step"] == next(s for s, v in values.items() if v == record["best_mrr"])
    assert (record["mrr"], record["stopped_early"]) == (values[9], False)
    best = find_checkpoint(folder / "run" / "best")
    assert best.step == record["best_step"]
    assert load_encoder(folder / "run" / "best").step == best.step
    write_report([folder / "run"])
    assert "Held-out retrieval" in (folder / "run" / "report.html").read_text("utf-8")
    Trainer(tiny(folder, train__max_steps=1, train__overwrite=True)).run()
    assert not [*(folder / "run" / "best").iterdir()]


def scripted(values: dict[int, float]) -> Any:
    """Evaluations that give these values, by the number of the call."""
    calls = itertools.count(1)

    def evaluate(self: Evaluation, *_: Any) -> dict[str, float]:
        value = values[next(calls)]
        names = ("recall@1", "recall@10", "mrr")
        return {**dict.fromkeys(names, value), "ndcg@10": -value, "queries": 1, "pool_size": 2}

    return mock.patch.object(Evaluation, "__call__", evaluate)


RISES_AND_FALLS = dict(enumerate([0.1, 0.3, 0.2, 0.3, 0.25, 0.4, 0.1, 0.1, 0.1], start=1))


def test_patience_ends_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {**EVERY_2, "train__max_steps": 20, "train__patience": 3}
    with scripted(RISES_AND_FALLS):
        record = Trainer(tiny(folder, **settings)).run()
    assert (record["steps"], record["stopped_early"]) == (10, True)
    assert (record["best_mrr"], record["best_step"]) == (0.3, 4)
    assert record["mrr"] == 0.25
    assert find_checkpoint(folder / "run" / "checkpoint").step == 10
    assert find_checkpoint(folder / "run" / "best").step == 4
    said = "Step 10 ends the run: mrr was not above 0.3000 of step 4 in 3 evaluations (train.pat"
    assert said in capsys.readouterr().out
    again = Trainer(tiny(folder, **settings, train__resume=True)).run()
    assert again == record
    assert "train.patience: 3 has ended the run" in capsys.readouterr().out
    more = {**settings, "train__patience": 4, "train__max_steps": 12, "train__resume": True}
    with scripted({1: 0.4}):
        record = Trainer(tiny(folder, **more)).run()
    assert (record["steps"], record["best_step"], record["stopped_early"]) == (12, 12, False)


def test_resumed_run_decides_as_an_uninterrupted_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best step comes after the checkpoint from which the run goes on."""
    settings = {**EVERY_2, "train__max_steps": 10, "train__save_every": 3}
    whole = Trainer(tiny(folder, train__output_dir=str(folder / "whole"), **settings)).run()
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, 6)
        with pytest.raises(Interrupted):
            Trainer(tiny(folder, **settings)).run()
    assert find_checkpoint(folder / "run" / "checkpoint").step == 3
    assert find_checkpoint(folder / "run" / "best").step == 4
    resumed = Trainer(tiny(folder, train__resume=True, **settings)).run()
    assert_same_run(folder / "run", folder / "whole")
    assert valid_of(folder / "run") == valid_of(folder / "whole")
    for key in ("best_step", "steps", "loss", "recall@1", "mrr"):
        assert resumed[key] == whole[key]
    states = [find_checkpoint(folder / name / "checkpoint").state for name in ("run", "whole")]
    assert states[0]["validation"] == states[1]["validation"]
    both = [find_checkpoint(folder / name / "best").weights_file for name in ("run", "whole")]
    assert both[0].read_bytes() == both[1].read_bytes()


ON_RANKS = {**EVERY_2, "train__max_steps": 6, "train__patience": 1, "launch__num_ranks": 2}


def rounded_elsewhere(*arguments: Any, **named: Any) -> dict[str, float]:
    """The metrics; rank 1 has another processor."""
    found = retrieval_metrics(*arguments, **named)
    return {**found, "mrr": found["mrr"] * (1 + 1e-9 * dist.get_rank())}


@unmeasured
def train_on_two_ranks(folder: str) -> Any:
    with mock.patch.object(evaluation, "retrieval_metrics", rounded_elsewhere):
        record = Trainer(tiny(Path(folder), **ON_RANKS)).run()
    ended = {**ON_RANKS, "train__output_dir": f"{folder}/ended", "train__best_metric": "ndcg@10"}
    with scripted(RISES_AND_FALLS):
        early = Trainer(tiny(Path(folder), **ended)).run()
    return record, early


def test_ranks_agree(folder: Path) -> None:
    first, second = run_ranks(train_on_two_ranks, 2, folder=str(folder))
    assert first == second
    record, early = first
    assert record["best_mrr"] == max(one["mrr"] for one in valid_of(folder / "run").values())
    assert (early["best_ndcg@10"], early["best_step"]) == (-0.1, 2)  # `scripted`: it falls first
    assert "untrained_ndcg@10" in early  # a row of the table
    assert (early["steps"], early["stopped_early"]) == (4, True)
