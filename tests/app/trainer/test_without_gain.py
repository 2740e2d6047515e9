"""A run that has taught nothing says so."""

from __future__ import annotations

import paddle
import pytest

from paddle_recompute import ContrastiveLoss
from paddle_recompute.app.config import load_config
from paddle_recompute.app.trainer.divergence import loss_of_chance, without_gain

TINY = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"
GOOD = {"loss": 3.0, "steps": 15, "mrr": 0.5, "untrained_mrr": 0.1}


@pytest.mark.parametrize(("hard_negatives", "symmetric"), [(0, True), (2, False)])
def test_chance_is_the_loss_of_equal_vectors(hard_negatives: int, symmetric: bool) -> None:
    given = {"hard_negatives": hard_negatives, "symmetric": str(symmetric).lower()}
    overrides = [f"contrastive.{name}={value}" for name, value in given.items()]
    config = load_config(TINY, ["contrastive.global_batch=8", *overrides])
    texts = [paddle.ones([8, 4]), paddle.ones([8, 4])]
    if hard_negatives:
        texts.append(paddle.ones([8 * hard_negatives, 4]))
    loss = ContrastiveLoss(0.05, symmetric=symmetric)(*texts)
    assert float(loss) == pytest.approx(loss_of_chance(config), rel=1e-5)


def test_ranks_apart_and_micro_batches_have_fewer_candidates() -> None:
    whole = loss_of_chance(load_config(TINY))
    apart = loss_of_chance(load_config(TINY, ["contrastive.negatives=local"]))
    merge = ["strategy.gradient_merge=true", "strategy.gradient_merge_configs.k_steps=2"]
    halves = loss_of_chance(load_config(TINY, merge))
    assert apart == halves == pytest.approx(whole - 0.6931, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"loss": 5.5435}, ["The loss 5.5435 is that of chance (5.5452)"]),
        ({"loss": 5.5435, "steps": 9}, []),
        ({"loss": None, "untrained_mrr": None}, []),
        ({"mrr": 0.05}, ["finds less than the untrained one"]),
    ],
)
def test_what_speaks_against_a_training_is_said(
    changes: dict[str, float | None], words: list[str]
) -> None:
    notes = without_gain(load_config(TINY), {**GOOD, **changes})
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))
