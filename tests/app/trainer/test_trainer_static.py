"""`mode: static` in the trainer: what is measured and refused; the shipped file on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_recompute.app.config import load_config
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.errors import ConfigError, StaticGraphError
from paddle_recompute.static_graph import StaticTrainStep
from tests.app.trainer.test_same_training import LOSS, WEIGHT_ON_RANKS, losses_of
from tests.app.trainer.test_trainer import tiny, unmeasured, weights_of
from tests.ranks import run_ranks


@pytest.mark.usefixtures("measured")
def test_the_step_that_is_measured_is_a_program_with_recompute_and_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recomputed: list[bool] = []
    build = StaticTrainStep.build

    def noting(self: StaticTrainStep, micro_batch: Any) -> None:
        build(self, micro_batch)
        try:
            self.explain()
            recomputed.append(True)
        except StaticGraphError:  # the Program has no checkpoints
            recomputed.append(False)

    monkeypatch.setattr(StaticTrainStep, "build", noting)
    Trainer(tiny(folder, mode="static", train__measure_plain=True, train__max_steps=1,
                 model__num_layers=1)).run()  # fmt: skip
    assert recomputed == [True, False, True]  # measured, measured without, trained


def test_an_unknown_operator_is_refused_before_anything_else(folder: Path) -> None:
    amp = {"dtype": "bfloat16", "custom_black_list": ["softmax", "layernorm"]}
    words = "custom_black_list: no operator of this Paddle is called 'layernorm'; did you mean lay"
    with pytest.raises(ConfigError, match=words):
        Trainer(tiny(folder, mode="static", strategy__amp=True, strategy__amp_configs=amp)).run()
    assert not (folder / "run").exists()


LARGE_BATCH = (
    Path(__file__).parents[3] / "fleet_configs" / "contrastive_ernie-tiny_large-batch_2cpu.yaml"
)


@unmeasured
def train_large_batch(folder: str) -> None:
    """The shipped file, with fewer and made-up pairs: chunks of tokens, tiles, masked negatives."""
    for mode in ("static", "dygraph"):
        overrides = {
            "mode": mode,
            "contrastive.global_batch": 16,
            "model.num_layers": 2,
            "contrastive.chunk_tokens": 64,
            "contrastive.tile": 4,
            "data.source": "files",
            "data.train_file": f"{folder}/pairs.tsv",
            "data.cache_dir": f"{folder}/cache",
            "data.valid_pairs": 20,
            "data.pool_size": 50,
            "data.vocab_size": 500,
            "train.max_steps": 3,
            "train.warmup_steps": 1,
            "train.eval_before": "false",
            "train.log_every": 1,
            "train.output_dir": f"{folder}/{mode}",
        }
        given = [f"{name}={value}" for name, value in overrides.items()]
        Trainer(load_config(LARGE_BATCH, given)).run()


def test_the_shipped_file_of_large_batches_trains_on_two_ranks(folder: Path) -> None:
    """Dropout is on, each rank has masks of its own: the same in both modes."""
    run_ranks(train_large_batch, 2, timeout=110, folder=str(folder))
    losses = losses_of(folder / "static")
    assert len(losses) == 3
    np.testing.assert_allclose(losses, losses_of(folder / "dygraph"), rtol=LOSS)
    static, dygraph = (weights_of(folder / mode) for mode in ("static", "dygraph"))
    for name, value in static.items():
        np.testing.assert_allclose(value, dygraph[name], rtol=0, atol=WEIGHT_ON_RANKS, err_msg=name)
