"""A model in training, in either mode, from given weights; what the two have in common."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import paddle
from numpy.typing import NDArray
from paddle.optimizer import AdamW, lr

from paddle_recompute.config import Config
from paddle_recompute.models import build_model
from paddle_recompute.parity.records import Arrays
from paddle_recompute.parity.variants import Mode
from paddle_recompute.recompute import apply_recompute
from paddle_recompute.static_graph import StaticTrainStep
from paddle_recompute.train_step import StepResult, build_optimizer
from paddle_recompute.trainer import Chunks, Objective

SIDES = ("query", "positive")
_MOMENT = "moment1"


class Run(Protocol):
    """A model in training.

    Args:
        config: Of this run.
        weights: Initial ones, by structured name.
        vocab_size: Rows of the word embedding.
        schedule: The learning rate; the caller's to step.
    """

    def __init__(
        self, config: Config, weights: Arrays, vocab_size: int, schedule: lr.LRScheduler
    ) -> None: ...

    def step(self, micro_batches: list[dict[str, NDArray[Any]]]) -> StepResult:
        """One optimizer step."""

    def moments(self) -> Arrays:
        """AdamW's first moment of every parameter that has one, by structured name."""

    def parameters(self) -> Arrays:
        """Parameters and buffers, by structured name."""


class DygraphRun:
    """`TrainStep`, put together as `Trainer` does."""

    def __init__(
        self, config: Config, weights: Arrays, vocab_size: int, schedule: lr.LRScheduler
    ) -> None:
        self._model = build_model(config.model, vocab_size)
        self._model.set_state_dict(weights)
        self._model.train()
        if config.recompute.enable:
            apply_recompute(self._model, config.recompute)
        objective = Objective(config, Chunks())
        self._optimizer = build_optimizer(config, self._model, schedule)
        self._step = objective.train_step(
            self._model,
            self._optimizer,
            objective.synchronization(self._model),
            accumulate_steps=config.strategy.gradient_merge_configs.k_steps,
            clip_grad_norm=config.train.clip_grad_norm,
            amp=config.strategy.amp_configs if config.strategy.amp else None,
        )

    def step(self, micro_batches: list[dict[str, NDArray[Any]]]) -> StepResult:
        return self._step(
            [{side: paddle.to_tensor(ids) for side, ids in one.items()} for one in micro_batches]
        )

    def moments(self) -> Arrays:
        state = self._optimizer.state_dict()
        keys = {name: f"{p.name}_{_MOMENT}_0" for name, p in self._model.named_parameters()}
        return {name: state[key].numpy() for name, key in keys.items() if key in state}

    def parameters(self) -> Arrays:
        return {name: tensor.numpy() for name, tensor in self._model.state_dict().items()}


class StaticRun:
    """`StaticTrainStep`."""

    def __init__(
        self, config: Config, weights: Arrays, vocab_size: int, schedule: lr.LRScheduler
    ) -> None:
        self._step = StaticTrainStep(
            config,
            lambda: build_model(config.model, vocab_size),
            Objective(config, Chunks()).loss_of,
            schedule=schedule,
            input_spec={side: paddle.static.InputSpec([-1, -1], "int64") for side in SIDES},
        )
        self._step.set_state_dict({"model": weights})

    def step(self, micro_batches: list[dict[str, NDArray[Any]]]) -> StepResult:
        return self._step(micro_batches)

    def moments(self) -> Arrays:
        return {
            name.removesuffix(f":{_MOMENT}"): array
            for name, array in self._step.state_dict()["optimizer"].items()
            if name.endswith(f":{_MOMENT}")
        }

    def parameters(self) -> Arrays:
        return self._step.state_dict()["model"]


RUNS: dict[Mode, type[Run]] = {"dygraph": DygraphRun, "static": StaticRun}


def gradients_of_first_step(run: Run) -> Arrays:
    """The gradients of the step that was just made, if it was the first: synchronized and clipped.

    AdamW's first moment is (1 - beta1) times the gradient then, whatever the mode; the gradients
    themselves are gone from a Program when it has run.
    """
    beta1 = inspect.signature(AdamW).parameters["beta1"].default
    return {name: moment / (1 - beta1) for name, moment in run.moments().items()}
