"""`strategy.lamb` and `strategy.lars`: Paddle's own optimizers, the same in both modes."""

from __future__ import annotations

from pathlib import Path

import paddle
import pytest

from paddle_recompute.app.encoder import build_model
from paddle_recompute.train_step import build_optimizer
from tests.app.trainer.test_same_training import WAYS
from tests.app.trainer.test_trainer import tiny


@pytest.mark.parametrize("kind", ["lamb", "lars"])
def test_the_update_is_paddles_own(tmp_path: Path, kind: str) -> None:
    config = tiny(tmp_path, **WAYS[kind][1])
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
