"""`no_duplicates` and `matryoshka_dims`: the batches of a run, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddle_recompute.app.config import Config
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.app.trainer.setup import load_batches, load_data
from paddle_recompute.errors import DataError
from tests.app.trainer.test_same_training import DISTINCT, write_duplicates
from tests.app.trainer.test_trainer import held_out, tiny


def configured(folder: Path, **changes: Any) -> Config:
    write_duplicates(folder / "pairs.tsv")
    return tiny(folder, **{**held_out(folder), **DISTINCT, **changes})


def test_batches_of_a_run_and_what_it_says(folder: Path) -> None:
    config = configured(folder)
    data, size = load_data(config, 0), config.contrastive.global_batch
    loader = load_batches(config, data, 0)
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


def test_pairs_that_fill_no_batch_are_refused(folder: Path) -> None:
    config = configured(folder)
    (folder / "pairs.tsv").write_text("".join(f"q{number}\tthe same\n" for number in range(90)))
    with pytest.raises(DataError, match=r"do not fill one batch.*data\.no_duplicates"):
        Trainer(config).run()
