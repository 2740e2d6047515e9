"""The recompute settings of PaddleFormers: the Layers that ours recomputes for them, and the
trainers whose own recompute is on.
"""

from __future__ import annotations

import types
from typing import Any

import paddle
import pytest

from paddle_recompute import RecomputeConfig, apply_recompute
from paddle_recompute.errors import ConfigError
from paddle_recompute.integrations import RecomputeTrainerMixin


class Block(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.mlp(self.self_attn(x))


class Model(paddle.nn.Layer):
    """Of the shape of a decoder of PaddleFormers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = paddle.nn.LayerList([Block() for _ in range(4)])


class Outer(paddle.nn.Layer):
    """As the models for a causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()


def settings(**given: Any) -> types.SimpleNamespace:
    names = ("granularity", "method", "num_layers", "modules", "mtp_granularity")
    told = {f"recompute_{name}": given.pop(name, None) for name in names}
    return types.SimpleNamespace(**told, **given)


def whole(*numbers: int, part: str = "") -> list[str]:
    return [f"layers.{number}{part}" for number in numbers]


FULL, SELECTIVE = {"granularity": "full"}, {"granularity": "selective"}
UNIFORM = {**FULL, "method": "uniform", "num_layers": 1}
FIRST = {**SELECTIVE, "method": "first_n"}
ATTENTION = ".self_attn"

CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"modules": ["mlp"], "method": "uniform", "num_layers": 1}, []),
    (UNIFORM, whole(0, 1, 2, 3)),
    ({**FULL, "method": "block", "num_layers": 2}, whole(0, 1)),
    ({**FULL, "method": "block", "num_layers": -1}, whole(0, 1, 2, 3)),
    ({**FULL, "method": "first_n", "num_layers": 3}, whole(0, 1, 2)),
    ({**FULL, "method": "first_n", "num_layers": 0}, []),
    ({**UNIFORM, "no_recompute_layers": [0, 2], "num_hidden_layers": 4}, whole(1, 3)),
    ({**FULL, "method": "block", "num_layers": 3, "no_recompute_layers": [1]}, whole(0, 2)),
    ({**SELECTIVE, "modules": ["full_attn"]}, whole(0, 1, 2, 3, part=ATTENTION)),
    ({**FIRST, "modules": ["full_attn"], "num_layers": 2}, whole(0, 1, part=ATTENTION)),
    ({**SELECTIVE, "modules": {"mlp": "all"}}, whole(0, 1, 2, 3, part=".mlp")),
    ({**SELECTIVE, "modules": {"mlp": None}}, whole(0, 1, 2, 3, part=".mlp")),
    ({**SELECTIVE, "modules": {"mlp": -1}}, whole(0, 1, 2, 3, part=".mlp")),
    ({**SELECTIVE, "modules": {"mlp": [3, 0]}}, whole(0, 3, part=".mlp")),
    ({**FIRST, "modules": {"mlp": 1, "full_attn": 1}}, ["layers.0.self_attn", "layers.0.mlp"]),
    (
        {**SELECTIVE, "modules": ["mlp"], "no_recompute_layers": [3], "num_hidden_layers": 4},
        whole(0, 1, 2, part=".mlp"),
    ),
    ({**SELECTIVE, "modules": None}, []),
]


@pytest.mark.parametrize(("given", "expected"), CASES, ids=str)
@pytest.mark.parametrize("kind", [Model, Outer])
def test_the_same_layers(given: dict[str, Any], expected: list[str], kind: type) -> None:
    config = RecomputeConfig.from_paddleformers(settings(**given))
    wrapped = apply_recompute(kind(), config).wrapped
    prefix = "" if kind is Model else "model."
    assert wrapped == tuple(prefix + name for name in expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"granularity": "core_attn"}, "recompute_granularity='core_attn': it is full, selective"),
        (FULL, "recompute_method=None: with full it is uniform, block or first_n"),
        ({**FULL, "method": "every", "num_layers": 1}, "recompute_method='every': with full"),
        ({**UNIFORM, "num_layers": 2}, "recompute_num_layers=2: uniform takes a number, and unif"),
        ({**FULL, "method": "first_n", "num_layers": -1}, "recompute_num_layers=-1: first_n takes"),
        ({**FULL, "method": "block"}, "recompute_num_layers=None: block takes a number"),
        ({**UNIFORM, "modules": {"flash_attn": 2}}, "with full it names parts to keep"),
        ({**UNIFORM, "mtp_granularity": "full"}, "recompute_mtp_granularity='full'"),
        ({**UNIFORM, "pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2"),
        ({**UNIFORM, "no_recompute_layers": [1]}, r"no_recompute_layers=\[1\]: give the model's"),
        ({**SELECTIVE, "modules": ["mlp", "core_attn"]}, "core_attn is no sublayer of a block"),
        ({**SELECTIVE, "modules": {"mlp": "most"}}, "'most' is not a number, a list or 'all'"),
        ({**SELECTIVE, "modules": {"mlp": 2}}, "recompute_method=None: 2 blocks need block or"),
    ],
)
def test_what_names_no_layers_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"from_paddleformers: .*{words}"):
        RecomputeConfig.from_paddleformers(settings(**given))


class Trainer:
    """What the mixin needs of a trainer before the first step."""

    def __init__(self, model: paddle.nn.Layer, args: Any) -> None:
        self.model, self.args = model, args

    def add_callback(self, callback: Any) -> None:
        """Of a loop that does not run here."""


class Mixed(RecomputeTrainerMixin, Trainer):  # type: ignore[misc]
    """With no library at all."""


def of_paddlenlp(granularity: str = "full") -> Model:
    """Its configurations have a granularity, which its ``recompute`` alone switches on."""
    model = Model()
    model.config = types.SimpleNamespace(recompute_granularity=granularity)
    return model


def of_paddleformers(granularity: str | None) -> Model:
    model = Model()
    model.config = settings(granularity=granularity, method="uniform", num_layers=1)
    return model


def enabled() -> Model:
    model = Model()
    model.layers[1].enable_recompute = True
    return model


@pytest.mark.parametrize(
    ("make", "args", "words"),
    [
        (Model, {}, None),
        (of_paddlenlp, {"recompute": False}, None),
        (lambda: of_paddleformers(None), {"recompute_granularity": None}, None),
        (of_paddlenlp, {"recompute": True}, "recompute=True of the training arguments"),
        (Model, {"recompute_granularity": "full"}, "recompute_granularity='full' of the training"),
        (lambda: of_paddleformers("selective"), {}, "'selective' of model.config"),
        (enabled, {}, "enable_recompute of Block"),
    ],
)
@pytest.mark.parametrize("is_given", [True, False])
def test_a_trainer_that_recomputes_itself(
    make: Any, args: dict[str, Any], words: str | None, is_given: bool
) -> None:
    arguments = types.SimpleNamespace(max_grad_norm=1.0, **args)
    recompute = RecomputeConfig(checkpoints=["layers.*"]) if is_given else None
    if words and is_given:
        with pytest.raises(ConfigError, match=words):
            Mixed(make(), arguments, recompute=recompute)
    else:
        report = Mixed(make(), arguments, recompute=recompute).recompute_report
        assert (report is not None and len(report.wrapped) == 4) is is_given
