"""`strategy.lamb` and `strategy.lars`: Paddle's own optimizers, the same in both modes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from pydantic import ValidationError

from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.train_step import build_optimizer
from tests.app.trainer.test_trainer import numbers_of, tiny, weights_of, write_pairs

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lamb": {
        "strategy__lamb": True,
        "strategy__lamb_configs": {
            "lamb_weight_decay": 0.02,
            "exclude_from_weight_decay": [".b_0"],
        },
    },
    "lars": {
        "strategy__lars": True,
        "strategy__lars_configs": {
            "lars_coeff": 0.1,
            "exclude_from_weight_decay": ["layer_norm", ".b_0"],
        },
        "train__learning_rate": 0.5,
    },
}
# These runs are equal to the bit (3.3.1, 2.6.2). But the factor of a clip is a float32 in a Program
# and a float64 on the host: that may differ in the last bit, and a trust ratio passes it on.
ROUNDING = 2e-5


def train(folder: Path, name: str, **changes: Any) -> Path:
    options: dict[str, Any] = {
        "model__hidden_dropout": 0.0,
        "model__attention_dropout": 0.0,
        "train__max_steps": 5,
        "train__eval_before": False,
        "train__measure_plain": False,
        "train__clip_grad_norm": 1.0,
        "train__output_dir": str(folder / name),
    }
    Trainer(tiny(folder, **{**options, **changes})).run()
    return folder / name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_both_modes_train_the_same(tmp_path: Path, kind: str) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    chosen = OPTIMIZERS[kind]
    dygraph = train(tmp_path, "dygraph", **chosen)
    static = train(tmp_path, "static", mode="static", **chosen)
    adamw = train(tmp_path, "adamw", train__learning_rate=chosen.get("train__learning_rate", 0.01))
    numbers = [[row[2:] for row in numbers_of(run)] for run in (dygraph, static)]
    np.testing.assert_allclose(numbers[1], numbers[0], rtol=ROUNDING)
    expected, found, other = (weights_of(run) for run in (dygraph, static, adamw))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=ROUNDING, err_msg=name)
    assert any(np.abs(other[name] - value).max() > 1e-3 for name, value in expected.items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_run_repeats_the_bits(tmp_path: Path, kind: str) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    whole = train(tmp_path, "whole", train__save_every=3, **OPTIMIZERS[kind])
    (whole / "checkpoint" / "step-5").rename(tmp_path / "step-5")
    expected = numbers_of(whole)
    again = train(tmp_path, "whole", train__save_every=3, train__resume=True, **OPTIMIZERS[kind])
    assert numbers_of(again) == expected


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_update_is_paddles_own(tmp_path: Path, kind: str) -> None:
    config = tiny(tmp_path, **OPTIMIZERS[kind])
    models = []
    for ours in (True, False):
        paddle.seed(0)
        with paddle.utils.unique_name.guard():
            model = build_model(config.model, 50)
        models.append(model)
        parameters = model.parameters()
        if ours:
            optimizer = build_optimizer(config.optimizer, model, 0.1)
        elif kind == "lamb":
            optimizer = paddle.optimizer.Lamb(
                0.1,
                0.02,
                parameters=parameters,
                exclude_from_weight_decay_fn=lambda one: one.name.endswith(".b_0"),
            )
        else:
            optimizer = paddle.incubate.optimizer.LarsMomentumOptimizer(
                0.1,
                0.9,
                0.1,
                parameter_list=parameters,
                exclude_from_weight_decay=["layer_norm", ".b_0"],
            )
        for _ in range(3):
            paddle.seed(1)
            model(paddle.ones([2, 4], "int64")).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert (one.numpy() == other.numpy()).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy__lars": True, "strategy__lamb": True}, "contradicts lamb"),
        ({"strategy__lamb": True, "train__weight_decay": 0.1}, "is AdamW's"),
        ({"strategy__lars_configs": {"epsilon": 1e-8}}, "has no effect while lars is false"),
        (
            {
                "strategy__lamb": True,
                "strategy__amp": True,
                "strategy__amp_configs": {"dtype": "bfloat16", "level": "O2"},
            },
            "not supported with amp level O2",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        tiny(tmp_path, **changes)
