"""What the section ``contrastive`` asks for reaches the training, and survives an interruption."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.report import read_metrics
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.errors import CheckpointError, ConfigError
from tests.app.trainer.test_trainer import tiny, weights_of
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


def test_learnable_temperature_must_stay_what_it_was(finished: Path) -> None:
    with pytest.raises(CheckpointError, match=r"contrastive\.learnable_temperature: false, and"):
        Trainer(tiny(finished, train__max_steps=3, train__resume=True, **LEARNED)).run()


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
