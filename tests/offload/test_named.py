"""Named sublayers of any model, off the device."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import TrainStep
from paddle_recompute._paddle.released_memory import has_memory
from paddle_recompute.errors import ConfigError, OffloadError, SelectionError
from paddle_recompute.offload import offload_layers, offloaded_optimizer, resident
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import recompute_wrapper
from tests.app.trainer.test_trainer import tiny
from tests.bits import assert_same_bits, values_of
from tests.offload.chains import BATCH, LENGTH, STEPS, VOCABULARY, WIDTH, adamw


class Tagger(paddle.nn.Layer):
    """Not a chain: its head uses the embedding's weight, its blocks get a mask."""

    def __init__(self) -> None:
        super().__init__()
        paddle.seed(11)
        self.embedding = paddle.nn.Embedding(VOCABULARY, WIDTH)
        block = paddle.nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1)
        self.encoder = paddle.nn.TransformerEncoder(block, 4)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        mask = paddle.cast(tokens != 0, "float32").unsqueeze([1, 2]) * 10.0 - 10.0
        x = self.encoder(self.embedding(tokens), mask)
        return paddle.matmul(x, self.embedding.weight, transpose_y=True)


def section(**changes: Any) -> RecomputeConfig:
    given = {"checkpoints": ["encoder.layers.*"], "offload_parameters": "disk", "num_shards": 2}
    return RecomputeConfig(**{**given, **changes})


def some_steps(config: RecomputeConfig | None) -> tuple[dict[str, np.ndarray], list[float]]:
    model = Tagger()
    if config is not None:
        offload_layers(model, config)
    parameters = model.parameters()
    optimizer = offloaded_optimizer(model, parameters, adamw) or adamw(parameters)

    def loss_fn(model: paddle.nn.Layer, tokens: paddle.Tensor) -> paddle.Tensor:
        return paddle.nn.functional.cross_entropy(model(tokens), tokens).mean()

    step = TrainStep(model, optimizer, loss_fn=loss_fn, clip_grad_norm=0.5, accumulate_steps=2)
    rng = np.random.default_rng(0)
    paddle.seed(5)
    losses = []
    for _ in range(STEPS):
        tokens = rng.integers(0, VOCABULARY, [2, BATCH, LENGTH])
        losses.append(step([paddle.to_tensor(part) for part in tokens]).loss)
    if config is not None:
        here = sum(has_memory(p) for p in model.encoder.parameters())
        assert here <= len(model.encoder.parameters()) // config.num_shards
    return values_of(model), losses


@pytest.mark.parametrize(
    "changes",
    [{}, {"offload_parameters": "host"}, {"num_shards": 4, "checkpoints": ["auto"]}],
    ids=str,
)
def test_steps_give_the_bits_of_the_plain_model(changes: dict[str, Any]) -> None:
    assert_same_bits(some_steps(None), some_steps(section(**changes)))


def test_the_report_names_the_shards() -> None:
    report = offload_layers(Tagger(), section(num_shards=3))
    assert [len(shard) for shard in report.shards] == [2, 1, 1]
    assert "to the disk, in 3 shards" in str(report)
    assert "encoder.layers.0 to encoder.layers.1" in str(report)


def test_what_cannot_be_offloaded_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are 4 Layers"):
        offload_layers(Tagger(), section(num_shards=5))
    model = Tagger()
    recompute_wrapper(model.encoder.layers[1])
    with pytest.raises(SelectionError, match="wrapped already"):
        offload_layers(model, section())
    model = Tagger()
    offload_layers(model, section())
    with pytest.raises(OffloadError, match="unwrapped"):
        model.encoder.layers[0].unwrap()
    weight = model.encoder.layers[0].linear1.weight
    with pytest.raises(OffloadError, match=r"resident\(model\)"):
        weight.detach()
    with resident(model):
        weight.sum().backward()
        assert np.array_equal(weight.grad.numpy(), np.ones(weight.shape))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "segments"}, "does not go with offload_parameters"),
        ({"offload": "host"}, "does not go with offload_parameters"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        section(**changes)
    with pytest.raises(ValueError, match="a Program owns its parameters"):
        tiny(tmp_path, mode="static", recompute__offload_parameters="disk")


def test_the_model_and_its_file_go_away_with_the_last_reference() -> None:
    model = Tagger()
    offload_layers(model, section())
    optimizer = offloaded_optimizer(model, model.parameters(), adamw)
    assert optimizer is not None
    file = weakref.ref(model.encoder.layers[0]._offload_chain)
    parameter = weakref.ref(model.encoder.layers[0].linear1.weight)
    del model, optimizer
    gc.collect()
    assert file() is None and parameter() is None
