"""The contrastive loss over the pairs of all ranks, in a Program: as one process with all pairs."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import distributed as dist
from paddle.static import InputSpec

from paddle_recompute import ContrastiveLoss, TrainStep, apply_recompute
from paddle_recompute.errors import DataError, PeerError
from paddle_recompute.static_graph import StaticTrainStep
from paddle_recompute.train_step.optimizer import build_optimizer
from tests.bfloat16 import needs_bfloat16
from tests.distributed.mortal_ranks import results_of
from tests.ranks import run_ranks
from tests.static_graph.models import HIDDEN, Stack
from tests.static_graph.test_train_step import (
    BFLOAT16_ON,
    SAME_NUMBERS,
    SAME_PARAMETERS,
    assert_same,
    config_of,
    tensors,
)

PAIRS, HARD, STEPS = 6, 2, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_sided": {"symmetric": False},
    "tiles": {"tile": 4},
    "everything": {
        "learnable_temperature": True,
        "mask_false_negatives": True,
        "label_smoothing": 0.2,
    },
}


class Towers(paddle.nn.Layer):
    """Two towers that share an encoder, and the loss, which may have a parameter too."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.layers = Stack(2, dropout).layers
        self.criterion = ContrastiveLoss(0.2, normalize=True, **options)

    def encode(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, batch: dict[str, Any]) -> Any:
        vectors = {"query": self.encode(batch["query"]), "positive": self.encode(batch["positive"])}
        if "hard" in batch:
            vectors["hard_negatives"] = self.encode(batch["hard"])
        ids = {name: batch[name] for name in batch if name.endswith("ids")}
        return self.criterion(**vectors, **ids)


def batches(name: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng(2)
    found = []
    for _ in range(STEPS):
        pair = rng.standard_normal((2, PAIRS, HIDDEN), "float32")
        batch: dict[str, Any] = {"query": pair[0], "positive": pair[1]}
        if name == "everything":
            # Equal in all but the last of 64 bits; the first is equal to one of the other rank.
            batch["positive_ids"] = (-(2**62) + np.array([1, 2, 3, 1, 5, 6])).astype("int64")
            batch["hard"] = rng.standard_normal((PAIRS, HARD, HIDDEN), "float32")
            ids = np.arange(PAIRS * HARD).reshape(PAIRS, HARD)
            batch["negative_ids"] = (-(2**62) + 2 + ids).astype("int64")
        found.append(batch)
    return found


def share(batch: dict[str, Any], rank: int) -> dict[str, Any]:
    return {name: np.split(array, 2)[rank] for name, array in batch.items()}


def step_of(name: str, *, any_size: bool = False, **options: Any) -> StaticTrainStep:
    def model() -> Towers:
        paddle.seed(5)
        return Towers(**OPTIONS[name], **options)

    spec = {
        key: InputSpec([-1, *array.shape[1:]], str(array.dtype))
        for key, array in batches(name)[0].items()
    }
    return StaticTrainStep(
        config_of(),
        model,
        lambda towers, batch: towers(batch),
        input_spec=spec if any_size else None,
    )


def trained_on_ranks() -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for name in OPTIONS:
        step = step_of(name, any_size=name == "one_sided")
        results = [step([share(batch, rank)]) for batch in batches(name)]
        found[name] = [(one.loss, one.grad_norm) for one in results], step.state_dict()
    return found


def one_more_on_a_rank() -> str:
    rank = dist.get_rank()
    one_more = {key: array[: 3 - rank] for key, array in share(batches("plain")[0], rank).items()}
    # A PeerError where the other rank, which sees it too, was first to end the run.
    with pytest.raises((DataError, PeerError)) as caught:
        step_of("one_sided", any_size=True)([one_more])
    return str(caught.value)


def test_numbers_of_rows_that_differ_are_refused() -> None:
    for message in results_of(one_more_on_a_rank):
        assert re.search("and another rank has other numbers; .*negatives: local", message)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(trained_on_ranks, 2, timeout=110)


@pytest.mark.parametrize("name", OPTIONS)
def test_negatives_of_all_ranks(ranks: list[dict[str, Any]], name: str) -> None:
    (results, state), (others, other_state) = (rank[name] for rank in ranks)
    assert results == others
    for section, value in state.items():
        assert_same(value, other_state[section])

    config = config_of()
    paddle.seed(5)
    model = Towers(**OPTIONS[name])
    apply_recompute(model, config.recompute)
    one_process = step_of(name)
    one_process.build(batches(name)[0])
    model.set_state_dict(
        {key: paddle.to_tensor(one) for key, one in one_process.state_dict()["model"].items()}
    )
    optimizer = build_optimizer(config.optimizer, model, config.learning_rate)
    dygraph = TrainStep(
        model,
        optimizer,
        loss_fn=lambda towers, batch: towers(batch),
        clip_grad_norm=config.train.clip_grad_norm,
    )
    for batch, result in zip(batches(name), results, strict=True):
        for expected in (one_process([batch]), dygraph([tensors(batch)])):
            assert result == pytest.approx(
                (expected.loss, expected.grad_norm), rel=10 * SAME_NUMBERS
            )
    for section, value in one_process.state_dict().items():
        assert_same(state[section], value, SAME_PARAMETERS)


class Scaled(paddle.nn.Layer):
    """Vectors without a matrix product; one whose result is not used lets mixed precision act."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.create_parameter(
            [HIDDEN], default_initializer=paddle.nn.initializer.Constant(1.5)
        )
        self.idle = paddle.nn.Linear(HIDDEN, HIDDEN)
        self.criterion = ContrastiveLoss(0.02, normalize=True)

    def forward(self, batch: dict[str, Any]) -> Any:
        query, positive = (batch[name] * self.scale for name in ("query", "positive"))
        return self.criterion(query, positive) + self.idle(batch["query"]).mean() * 0.0


@needs_bfloat16
def test_the_loss_is_in_float32_whatever_the_encoder_is_in() -> None:
    """Scores times 50 in bfloat16, with 8 bits, would be noise."""

    def losses(*overrides: str) -> list[float]:
        config = config_of("recompute.enable=false", *overrides, recompute=False)
        step = StaticTrainStep(config, Scaled, lambda model, batch: model(batch))
        return [step([batch]).loss for batch in batches("plain")]

    half = losses(*BFLOAT16_ON)
    assert half == losses()
