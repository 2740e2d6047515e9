"""What is said of a step that is not finite: also of the buffers that its forward wrote."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from paddle_recompute.app.trainer.divergence import explained
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
