"""Train a model in either mode from given weights."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.optimizer import AdamW, lr

from paddle_recompute.app.config import Config
from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.parity.records import Arrays
from paddle_recompute.app.trainer import Chunks, Objective, build_step
from paddle_recompute.recompute import apply_recompute
from paddle_recompute.train_step import StepResult

_MOMENT = ":moment1"


class Run:
    """A model in training.

    Args:
        config: The configuration of this run, with its mode.
        weights: The initial weights, by structured name.
        vocab_size: Rows of the word embedding.
        schedule: The learning rate; the caller steps it.
    """

    def __init__(
        self, config: Config, weights: Arrays, vocab_size: int, schedule: lr.LRScheduler
    ) -> None:
        model = build_model(config.model, vocab_size)
        model.train()
        section = config.contrastive
        objective = Objective(config, Chunks(section.chunk_size, section.chunk_tokens))
        self._state = {**model.state_dict(), **objective.parameters()}
        for name, array in weights.items():
            self._state[name].set_value(array)
        if config.mode == "dygraph" and config.recompute.enable:
            apply_recompute(model, config.recompute)
        amp = config.strategy.amp_configs if config.strategy.amp else None
        self._step = build_step(config, objective, model, schedule, vocab_size=vocab_size, amp=amp)

    def step(self, micro_batches: list[dict[str, NDArray[Any]]]) -> StepResult:
        """One optimizer step."""
        return self._step(
            [{name: paddle.to_tensor(ids) for name, ids in one.items()} for one in micro_batches]
        )

    def moments(self) -> Arrays:
        """AdamW's first moment of every parameter that has one, by structured name."""
        return {
            name.removesuffix(_MOMENT): np.array(moment)
            for name, moment in self._step.state_dict()["optimizer"].items()
            if name.endswith(_MOMENT)
        }

    def parameters(self) -> Arrays:
        """Parameters and buffers, by structured name; names of the loss begin with ``loss/``."""
        self._step.write_back()
        return {name: tensor.numpy() for name, tensor in self._state.items()}


def gradients_of_first_step(run: Run) -> Arrays:
    """The synchronized and clipped gradients of the last step, which must be the first one.

    After the first step, AdamW's first moment is (1 - beta1) times the gradient in both modes. A
    Program frees the gradients themselves.
    """
    beta1 = inspect.signature(AdamW).parameters["beta1"].default
    return {name: moment / (1 - beta1) for name, moment in run.moments().items()}
