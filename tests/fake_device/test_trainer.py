"""A whole run on two devices: data, steps, evaluation, a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute._paddle import memory
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.checkpoint import find_checkpoint
from tests.app.trainer.test_trainer import tiny, write_pairs
from tests.ranks import run_ranks


def train(folder: str) -> dict[str, Any]:
    settings = {"train__max_steps": 4, "launch__num_ranks": 2}
    set_device = paddle.set_device
    # launch.device is cpu or gpu; here it is the device that tests/conftest.py has set.
    paddle.set_device = lambda name: None  # type: ignore[assignment]
    try:
        return dict(Trainer(tiny(Path(folder), **settings)).run())
    finally:
        paddle.set_device = set_device


@pytest.mark.skipif(not memory.can_reset_peak(), reason="2.6 counts no memory of this device")
def test_a_run_ends_with_the_same_record_on_all_ranks(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    one, other = run_ranks(train, 2, folder=str(tmp_path), timeout=110)
    assert one == other
    assert np.isfinite(one["loss"])
    assert 0 < one["mrr"] <= 1
    assert find_checkpoint(tmp_path / "run" / "checkpoint").weights_file.is_file()
