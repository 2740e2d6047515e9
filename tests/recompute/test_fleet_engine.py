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


def test_an_encoder_with_dropout_is_that_of_the_plain_run() -> None:
    def outcome(enable: bool) -> Seen:
        block = paddle.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
        model, x = paddle.nn.TransformerEncoder(block, 3), leaf(2, 4, 8)
        apply_recompute(model, RecomputeConfig(enable=enable, engine="fleet"))
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


class Sum(paddle.nn.Layer):
    def forward(self, x: paddle.Tensor, rest: dict[str, paddle.Tensor]) -> paddle.Tensor:
        return x + rest["y"]


def test_a_call_that_fleet_would_get_wrong_is_refused() -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), Sum())
    apply_recompute(model, FLEET)
    with pytest.raises(RecomputeError, match="no argument of 0 needs a gradient"):
        model[0](paddle.ones([2, 4]))
    x = leaf(2, 4)
    with pytest.raises(RecomputeError, match="inside a container"):
        model[1](x, {"y": x * 2})
    assert model[1](x, rest={"y": paddle.ones([2, 4])}).shape == [2, 4]


def linear_with_a_function() -> paddle.nn.Layer:
    layer = paddle.nn.Linear(4, 4)
    layer.activation = paddle.nn.functional.gelu
    return layer


@pytest.mark.parametrize(
    ("make", "checkpoint", "words"),
    [
        (lambda: paddle.nn.BatchNorm1D(4), "*", r"'1\.1' has the buffer .*twice per step"),
        (
            lambda: paddle.nn.utils.spectral_norm(paddle.nn.Linear(4, 4)),
            "*",
            r"'1\.1' has the buffer .*twice per step",
        ),
        (linear_with_a_function, "1.1.activation", r"'1\.1\.activation' is a function"),
    ],
    ids=["BatchNorm", "spectral_norm", "a function"],
)
def test_a_part_that_fleet_would_get_wrong_is_refused(
    make: Any, checkpoint: str, words: str
) -> None:
    inner = paddle.nn.Sequential(paddle.nn.Linear(4, 4), make())
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), inner)
    with pytest.raises(SelectionError, match=words):
        apply_recompute(model, RecomputeConfig(engine="fleet", checkpoints=[checkpoint]))
    assert [type(part) for part in model] == [paddle.nn.Linear, paddle.nn.Sequential]


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
    (said,) = (one for one in caplog.messages if "use_reentrant" in one)
    assert said.endswith("To use Paddle's own recompute, set recompute.engine: fleet")
    assert np.all(layer.weight.grad.numpy() == 4)
