"""`recompute.engine: fleet`, Paddle's own recompute: right, or refused. And `use_reentrant`."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import RecomputeConfig, apply_recompute, recompute
from paddle_recompute._paddle.fleet_recompute import fleet_recompute
from paddle_recompute._paddle.static.training import static_mode
from paddle_recompute.errors import ConfigError, RecomputeError, SelectionError, StaticGraphError
from paddle_recompute.recompute import _fleet, function
from tests.recompute.contract import Seen, assert_as_plain, leaf

FLEET = RecomputeConfig(engine="fleet", checkpoints=["*"])


@pytest.mark.parametrize("engine", ["fleet", "paddle_recompute"])
def test_an_encoder_with_dropout_is_that_of_the_plain_run(engine: Any) -> None:
    def outcome(enable: bool) -> Seen:
        block = paddle.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
        model, x = paddle.nn.TransformerEncoder(block, 3), leaf(2, 4, 8)
        apply_recompute(model, RecomputeConfig(enable=enable, engine=engine))
        y = model(x * 2)
        y.square().sum().backward()
        return {"y": y, "x": x, "model": model}

    assert_as_plain(outcome, True, False)


def test_fleets_recompute_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = fleet_recompute
    monkeypatch.setattr(
        _fleet,
        "fleet_recompute",
        lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs),
    )
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4))
    report = apply_recompute(model, FLEET)
    model(leaf(2, 4)).sum().backward()
    assert report.wrapped == ("0", "1") and len(calls) == 2


def test_a_block_whose_input_needs_no_gradient_is_refused() -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4))
    apply_recompute(model, FLEET)
    with pytest.raises(RecomputeError, match="no argument of 0 needs a gradient"):
        model(paddle.ones([2, 4]))


def test_a_tensor_in_a_container_is_refused() -> None:
    class Sum(paddle.nn.Layer):
        def forward(self, x: paddle.Tensor, rest: dict[str, paddle.Tensor]) -> paddle.Tensor:
            return x + rest["y"]

    model = paddle.nn.Sequential(Sum())
    apply_recompute(model, FLEET)
    x = leaf(2, 4)
    with pytest.raises(RecomputeError, match="inside a container"):
        model[0](x, {"y": x * 2})
    assert model[0](x, rest={"y": paddle.ones([2, 4])}).shape == [2, 4]


@pytest.mark.parametrize("kind", [paddle.nn.BatchNorm1D, paddle.nn.utils.spectral_norm])
def test_a_layer_with_buffers_is_refused(kind: Any) -> None:
    is_norm = kind is paddle.nn.BatchNorm1D
    with_buffer = kind(4) if is_norm else kind(paddle.nn.Linear(4, 4))
    parts = [paddle.nn.Linear(4, 4), paddle.nn.Sequential(paddle.nn.Linear(4, 4), with_buffer)]
    model = paddle.nn.Sequential(*parts)
    with pytest.raises(SelectionError, match=r"'1\.1' has the buffer .*twice per step"):
        apply_recompute(model, FLEET)
    assert [type(part) for part in model] == [paddle.nn.Linear, paddle.nn.Sequential]


def test_a_function_is_refused() -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4))
    model[0].activation = paddle.nn.functional.gelu
    with pytest.raises(SelectionError, match=r"'0\.activation' is a function"):
        apply_recompute(model, RecomputeConfig(engine="fleet", checkpoints=["0.activation"]))


@pytest.mark.parametrize("setting", [{"policy": "segments"}, {"offload": "disk"}])
def test_what_fleet_has_not_is_refused(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="does not go with engine: fleet"):
        RecomputeConfig(engine="fleet", **setting)


def test_a_program_is_refused() -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4))
    apply_recompute(model, FLEET)
    with static_mode(), pytest.raises(StaticGraphError, match="works in dygraph only"):
        model(paddle.static.data("x", [2, 4]))
    assert type(model[0].unwrap()) is paddle.nn.Linear
    assert "_recompute_name" not in vars(model[0])


def test_use_reentrant_is_accepted_and_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    function.log_reentrant.cache_clear()
    layer, x = paddle.nn.Linear(4, 4), paddle.ones([2, 4])
    with caplog.at_level(logging.INFO, logger="paddle_recompute"):
        for _ in range(2):  # no input needs a gradient: Paddle's reentrant form would give none
            recompute(layer, x, use_reentrant=True).sum().backward()
    assert [record.message for record in caplog.records if "use_reentrant" in record.message] == [
        "use_reentrant=True has no effect: paddle_recompute has one form of recompute. To use "
        "Paddle's own recompute, set recompute.engine: fleet"
    ]
    assert np.all(layer.weight.grad.numpy() == 4)
