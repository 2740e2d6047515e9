"""`train.compile`: the run of eager execution, and what is said where a model is not converted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_recompute.app.trainer import Trainer
from paddle_recompute.errors import StaticGraphError
from tests.app.trainer.test_trainer import numbers_of, tiny, weights_of, write_pairs

IS_26 = paddle.__version__.startswith("2.6")
# Paddle 2.6 adds up gradients in another order in a Program; AdamW makes a step of the noise.
ROUNDING = 2e-5 if IS_26 else 0.0


def train(folder: Path, name: str, **changes: object) -> Path:
    options = {"train__max_steps": 4, "train__eval_before": False}
    options |= {"recompute__enable": not IS_26, "contrastive__chunk_size": 4, **changes}
    Trainer(tiny(folder, train__output_dir=str(folder / name), **options)).run()
    return folder / name


def test_the_run_of_eager_execution(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    eager = train(tmp_path, "eager")
    compiled = train(tmp_path, "compiled", train__compile="to_static")
    assert "The model is compiled" in capsys.readouterr().out
    numbers = [[row[2:] for row in numbers_of(run)] for run in (eager, compiled)]
    np.testing.assert_allclose(numbers[1], numbers[0], rtol=ROUNDING)
    expected, found = weights_of(eager), weights_of(compiled)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=ROUNDING, err_msg=name)


@pytest.mark.skipif(not IS_26, reason="Paddle 3.3 converts a wrapped model")
def test_a_wrapped_model_on_2_6(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    wrapped = {"recompute__enable": True, "train__max_steps": 1}
    train(tmp_path, "auto", train__compile="auto", **wrapped)
    assert "not compiled, eager execution goes on: paddle.jit.to_static" in capsys.readouterr().out
    with pytest.raises(StaticGraphError, match=r"cannot convert.*Use train\.compile: auto"):
        train(tmp_path, "to_static", train__compile="to_static", **wrapped)
