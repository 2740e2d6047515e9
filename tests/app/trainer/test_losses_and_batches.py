"""`no_duplicates` and `matryoshka_dims` in training: modes, ranks, interruptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from paddle_recompute.app.config import Config
from paddle_recompute.app.data import loader_for, prepare_data
from paddle_recompute.app.trainer import Trainer, memory_probe
from paddle_recompute.errors import ConfigError, DataError
from tests.app.trainer.test_hard_negatives import STILL, train
from tests.app.trainer.test_trainer import (
    Interrupted,
    assert_same_run,
    held_out,
    interrupt_in_step,
    numbers_of,
    tiny,
)
from tests.app.trainer.test_trainer_static import assert_close
from tests.ranks import run_ranks

NEW: dict[str, Any] = {
    "data__no_duplicates": True,
    "contrastive__matryoshka_dims": [4, 16],
    "contrastive__chunk_size": 3,
    "train__eval_before": False,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With ``pairs.tsv``: 90 pairs, 45 different queries and 30 different positives."""
    lines = [f"q{n % 45} w{n % 7}\tp{n % 30} w{n % 5}\n" for n in range(90)]
    (tmp_path / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def configured(folder: Path, **changes: Any) -> Config:
    return tiny(folder, **{**held_out(folder), **NEW, **changes})


def test_batches_of_a_run_and_what_it_says(folder: Path) -> None:
    config = configured(folder)
    data = prepare_data(config.data, seed=0, is_main_rank=True, barrier=lambda: None)
    size = config.contrastive.global_batch
    loader = loader_for(config, data.train, data.tokenizer, local_batch=size, rank=0, num_ranks=1)
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            pairs = [data.train[place] for place in batch["index"].tolist()]
            assert len({pair.query for pair in pairs}) == len({p.positive for p in pairs}) == size
    left_out = len(data.train) - size * len(loader)
    expected = (
        f"{left_out} of {len(data.train)} training pairs are left out, other ones in each "
        "epoch: they fill no global batch without an equal query or positive"
    )
    assert left_out > 0
    assert expected in loader.notes()


@pytest.mark.usefixtures("unmeasured")
def test_pairs_that_fill_no_batch_are_refused(folder: Path) -> None:
    (folder / "pairs.tsv").write_text(
        "".join(f"q{number}\tthe same\n" for number in range(90)), encoding="utf-8"
    )
    with pytest.raises(DataError, match=r"do not fill one batch.*data\.no_duplicates"):
        train(configured(folder))


@pytest.mark.usefixtures("unmeasured")
def test_resumed_run_repeats_the_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second epoch or later."""
    settings = {"train__save_every": 5, "train__max_steps": 12}
    whole = train(configured(folder, train__output_dir=str(folder / "whole"), **settings))
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, 12)
        with pytest.raises(Interrupted):
            Trainer(configured(folder, **settings)).run()
    assert_same_run(train(configured(folder, train__resume=True, **settings)), whole)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("tile", [None, 4])
def test_a_program_trains_what_dygraph_trains(folder: Path, tile: int | None) -> None:
    settings = {**STILL, "contrastive__tile": tile, "train__max_steps": 6}
    modes = [
        train(configured(folder, mode=mode, train__output_dir=str(folder / mode), **settings))
        for mode in ("static", "dygraph")
    ]
    assert_close(*modes)


ON_RANKS = {**STILL, "train__max_steps": 3, "train__overwrite": True}


def train_on_two_ranks(folder: str) -> list[Any]:
    with mock.patch.object(memory_probe, "measure_step", lambda *_, **options: 1):
        return [
            numbers_of(train(configured(Path(folder), **ON_RANKS, launch__num_ranks=2, mode=mode)))
            for mode in ("dygraph", "static")
        ]


@pytest.mark.usefixtures("unmeasured")
def test_two_ranks_train_what_one_trains(folder: Path) -> None:
    alone = numbers_of(train(configured(folder, **ON_RANKS)))
    for found in run_ranks(train_on_two_ranks, 2, folder=str(folder)):
        for run in found:
            np.testing.assert_allclose(run, alone, rtol=1e-4)


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ([4, 8], r"must have model\.hidden_size = 16 as its largest"),
        ([16, 16], "must be different numbers"),
        ([], "at least 1 item"),
        ([0, 16], "matryoshka_dims"),
    ],
)
def test_dims_that_do_not_fit_are_refused(folder: Path, dims: list[int], words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        configured(folder, contrastive__matryoshka_dims=dims)
