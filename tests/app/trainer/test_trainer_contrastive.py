"""What the section ``contrastive`` asks for reaches the training, and survives an interruption."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.report import read_metrics
from paddle_recompute.app.trainer import Trainer, objective
from paddle_recompute.contrastive import ContrastiveLoss
from paddle_recompute.errors import CheckpointError, ConfigError
from tests.app.trainer.test_trainer import (
    tiny,
    weights_of,
)
from tests.distributed.mortal_ranks import results_of

LEARNED = {"contrastive__learnable_temperature": True}


def temperatures(output_dir: Path) -> list[float]:
    return [record["temperature"] for record in read_metrics(output_dir / "metrics.jsonl")]


def test_the_temperature_is_trained_without_weight_decay(folder: Path) -> None:
    """Nor is it clipped apart: with a gradient of next to nothing it stays where it was."""
    settings = {**LEARNED, "train__max_steps": 2, "train__eval_before": False}
    decayed = {"train__weight_decay": 0.5, "train__output_dir": str(folder / "decayed")}
    Trainer(tiny(folder, **settings)).run()
    Trainer(tiny(folder, **{**settings, **decayed})).run()
    # After the first step only: later ones see other weights.
    assert temperatures(folder / "run")[0] == temperatures(folder / "decayed")[0] != 0.05
    ones, others = weights_of(folder / "run"), weights_of(folder / "decayed")
    assert any(not np.array_equal(ones[name], others[name]) for name in ones)
    assert not any("logit_scale" in name for name in ones)  # it is no part of the model


def test_learnable_temperature_must_stay_what_it_was(folder: Path) -> None:
    settings = {"train__max_steps": 1, "train__eval_before": False}
    Trainer(tiny(folder, **settings)).run()
    with pytest.raises(CheckpointError, match=r"contrastive\.learnable_temperature: false, and"):
        Trainer(tiny(folder, **settings, **LEARNED, train__resume=True)).run()


@pytest.mark.parametrize("chunk_size", [None, 3])
def test_positives_of_equal_texts_are_masked(
    folder: Path, chunk_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (folder / "pairs.tsv").read_text(encoding="utf-8").splitlines()
    words = [line.split("\t")[0] for line in lines]
    pairs = [f"{word}\t{'k l m' if i % 3 else 'n o p'}" for i, word in enumerate(words)]
    (folder / "pairs.tsv").write_text("\n".join(pairs) + "\n", encoding="utf-8")
    (folder / "valid.tsv").write_text("a b c\tk l m\n", encoding="utf-8")
    seen: list[dict[str, Any]] = []
    forward = ContrastiveLoss.forward

    def noted(self: Any, query: Any, positive: Any, **named: Any) -> paddle.Tensor:
        seen.append(named)
        return forward(self, query, positive, **named)

    monkeypatch.setattr(ContrastiveLoss, "forward", noted)
    batches: list[Any] = []
    step = objective.TrainStep.__call__

    def noting(self: Any, micro_batches: Any) -> Any:
        batches.extend(micro_batches)
        return step(self, micro_batches)

    monkeypatch.setattr(objective.TrainStep, "__call__", noting)
    Trainer(
        tiny(
            folder,
            contrastive__mask_false_negatives=True,
            contrastive__chunk_size=chunk_size,
            data__valid_file=str(folder / "valid.tsv"),
            data__valid_pairs=2000,
            data__pool_size=2,
            train__max_steps=3,
            train__eval_before=False,
        )
    ).run()
    assert len(seen) == len(batches) == 3
    for named, batch in zip(seen, batches, strict=True):
        ids = named["positive_ids"].tolist()
        texts = [tuple(row) for row in batch["positive"].tolist()]
        assert len(set(ids)) == len(set(texts)) == 2
        assert len(set(zip(ids, texts, strict=True))) == 2  # equal numbers, equal texts


# --------------------------------------------------------------------------------- the budget


BUDGET = {
    "contrastive__global_batch": 16,
    "contrastive__memory_budget": "340KiB",
    "train__max_steps": 2,
    "train__eval_before": False,
}


def train_within_a_budget(folder: str) -> list[Any]:
    """A run, one that resumes it, and one that asks for too little: what they gave and printed."""
    found: list[Any] = []
    too_little = {"train__output_dir": f"{folder}/run3", "contrastive__memory_budget": 10_000}
    for more in ({}, {"train__max_steps": 3, "train__resume": True}, too_little):
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            try:
                result: Any = Trainer(tiny(Path(folder), **{**BUDGET, **more})).run()
            except ConfigError as error:
                result = str(error)
        found.append((result, shown.getvalue()))
    return found


@pytest.mark.skipif(not _memory.can_reset_peak(), reason="needs the peak of a step alone")
def test_memory_budget(folder: Path) -> None:
    """Chunks are measured, kept to in training, and taken over when the run is resumed.

    In a process of its own: what other tests have left in this one would count too.
    """
    (found,) = results_of(train_within_a_budget, 1, folder=str(folder))
    (record, shown), (again, shown_again), (refused, _) = found
    assert record["chunk_tokens"] is not None and record["chunk_size"] is None
    assert f"each rank encodes {record['chunk_tokens']} tokens at a time (contrastive.ch" in shown
    assert record["peak_bytes"] <= 340 * 1024
    page = (folder / "run" / "report.html").read_text(encoding="utf-8")
    assert f"{record['chunk_tokens']} tokens encoded at a time" in page
    assert again["chunk_tokens"] == record["chunk_tokens"]
    assert f"{record['chunk_tokens']} tokens at a time, as before" in shown_again
    assert "memory_budget: 9.8 KiB is too little; a step that" in refused
