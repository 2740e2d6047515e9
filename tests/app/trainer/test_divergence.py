"""What is said of a step that is not finite: also of the buffers that its forward wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from paddle_recompute import ContrastiveLoss
from paddle_recompute.app.config import load_config
from paddle_recompute.app.trainer.divergence import explained, loss_of_chance, without_gain
from paddle_recompute.app.trainer.events import Events
from paddle_recompute.errors import DivergenceError
from paddle_recompute.train_step import StepResult
from tests.app.trainer.test_statistics_of_ranks import Normed
from tests.app.trainer.test_trainer import tiny


def after_a_step_of_nan() -> paddle.nn.Layer:
    """A BatchNorm of which one forward got NaN; its parameters are as before."""
    model = Normed(10)
    model.norm(paddle.full([4, 8], float("nan")))
    return model


def test_statistics_of_a_diverged_step_are_not_weights_from_before_it() -> None:
    error = DivergenceError("the loss is nan, the gradient norm is nan")
    told = str(explained(error, 3, after_a_step_of_nan()))
    assert "The weights are finite; the loss is the first that is not" in told
    assert "The buffer norm._mean, which a forward has written, is not finite either" in told
    model = after_a_step_of_nan()
    model.words.weight.set_value(paddle.full([10, 8], float("nan")))
    assert "not finite before this step: words.weight" in str(explained(error, 3, model))


@pytest.mark.parametrize("is_normed", [True, False])
def test_a_skipped_step_names_the_buffer_that_it_left_not_finite(
    is_normed: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = after_a_step_of_nan() if is_normed else paddle.nn.Linear(2, 2)
    run: Any = SimpleNamespace(
        step=9, done=0, total=20, model=model, result=StepResult(float("nan"), 1.0, {}, True, 8.0)
    )
    Events(tiny(folder), 0).after_step(run)
    told = capsys.readouterr().out
    assert "Step 9 is skipped" in told
    assert ("left the buffer norm._mean not finite, and it stays so" in told) == is_normed


# -------------------------------------------------------------------- a run that has taught nothing


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
        ({"loss": 5.5435}, ["The loss 5.5435 is no better than that of chance (5.5452)"]),
        ({"loss": 6.5}, ["The loss 6.5000 is no better than that of chance (5.5452)"]),
        ({"loss": 5.5435, "steps": 9}, []),
        ({"loss": None, "untrained_mrr": None}, []),
        ({"mrr": 0.05}, ["finds less than the model before training"]),
    ],
)
def test_what_speaks_against_a_training_is_said(
    changes: dict[str, float | None], words: list[str]
) -> None:
    notes = without_gain(load_config(TINY), {**GOOD, **changes})
    assert len(notes) == len(words)
    assert all(word in note for word, note in zip(words, notes, strict=True))


def test_the_advice_is_for_the_weights_that_the_run_began_with() -> None:
    config, record = load_config(TINY), {**GOOD, "loss": 5.5435}
    of_weights = config.model.model_copy(update={"init_from": Path("weights")})
    pretrained = config.model_copy(update={"model": of_weights})
    assert "Try model.pooling: mean" in without_gain(config, record)[0]
    [note] = without_gain(pretrained, record)
    assert "Try another contrastive.temperature" in note and "pooling" not in note
