"""What `Trainer` trains with, in either mode: a step, an optimizer to save, a synchronization."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.optimizer import lr

from paddle_recompute.config import AmpConfigs, Config
from paddle_recompute.errors import ConfigError
from paddle_recompute.models import build_model
from paddle_recompute.replay import RngState
from paddle_recompute.static_graph import StaticTrainStep, check_static
from paddle_recompute.train_step import StepResult, build_optimizer, check_device
from paddle_recompute.trainer.objective import Batch, Objective


@dataclass(frozen=True)
class Training:
    """A model in training.

    Attributes:
        optimizer: ``state_dict``, ``set_state_dict`` and ``get_lr`` as Paddle's have them, moments
            under the names of the model's parameters.
        sync: What a checkpoint asks a `GradientSync` for.
        step: Called as `TrainStep`.
    """

    optimizer: Any
    sync: Any
    step: Any

    def write_back(self) -> None:
        """Bring the model up to date with the steps that were made."""
        if isinstance(self.step, ProgramStep):
            self.step.write_back()


def check_mode(config: Config) -> None:
    """Check that ``config.mode`` can honour the configuration on this device.

    Raises:
        ConfigError: It cannot; the message lists every setting in question.
    """
    if config.mode == "dygraph":
        if config.strategy.amp:
            check_device(config.strategy.amp_configs)
        return
    check_static(config)
    if config.contrastive.learnable_temperature:
        raise ConfigError(
            "contrastive.learnable_temperature: true: in mode: static the parameters of the "
            "encoder alone are trained; remove it, and set contrastive.temperature to what a "
            "dygraph run has learned"
        )


def build_training(
    config: Config,
    objective: Objective,
    model: paddle.nn.Layer,
    schedule: lr.LRScheduler | float,
    *,
    vocab_size: int,
    amp: AmpConfigs | None,
) -> Training:
    """Put together what trains `model` as `config` says.

    Args:
        config: Of the run; `check_mode` has passed it.
        objective: The loss.
        model: The encoder. In static mode a Program is trained that starts from its weights, and
            `Training.write_back` copies them back: they are in memory twice.
        schedule: The learning rate.
        vocab_size: Rows of the word embedding.
        amp: Mixed precision in dygraph; a Program has that of `config`.
    """
    if config.mode == "static":
        step = ProgramStep(config, objective, model, schedule, vocab_size)
        return Training(ProgramOptimizer(step, schedule), ProgramSync(), step)
    optimizer = build_optimizer(config, model, schedule, objective.loss.parameters())
    sync = objective.synchronization(model)
    train_step = objective.train_step(
        model,
        optimizer,
        sync,
        accumulate_steps=config.strategy.gradient_merge_configs.k_steps,
        clip_grad_norm=config.train.clip_grad_norm,
        amp=amp,
    )
    return Training(optimizer, sync, train_step)


class ProgramStep:
    """A `StaticTrainStep` that starts from the weights of a dygraph model; called as `TrainStep`.

    The Program is built in the first step, with no effect on the random numbers of that step: a run
    that is resumed builds it in another one, and must draw the same masks.
    """

    num_skipped = 0
    """Nothing is: float16, whose loss scale skips steps, is refused in static mode."""

    def __init__(
        self,
        config: Config,
        objective: Objective,
        model: paddle.nn.Layer,
        schedule: lr.LRScheduler | float,
        vocab_size: int,
    ) -> None:
        # The Program's model gets the weights of `model`, wherever these are from.
        section = config.model.model_copy(update={"init_from": None})
        spec = {side: paddle.static.InputSpec([-1, -1], "int64") for side in ("query", "positive")}
        if config.contrastive.mask_false_negatives:
            spec["positive_ids"] = paddle.static.InputSpec([-1], "int64")
        self.model = model
        self._step = StaticTrainStep(
            config,
            lambda: build_model(section, vocab_size),
            objective.loss_of,
            schedule=schedule,
            input_spec=spec,
        )
        self._is_built = False
        self._moments: dict[str, Any] = {}  # those to start from

    def __call__(self, micro_batches: Sequence[Batch]) -> StepResult:
        """One optimizer step; as `StaticTrainStep`."""
        if not self._is_built:
            self._build(micro_batches[0])
        return self._step(micro_batches)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Evaluation is in float32, whatever the Program is in: so are its parameters."""
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on beside model and optimizer: nothing."""
        return {}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to restore; the loss scale of a run in float16 has no use here."""

    def moments(self) -> dict[str, Any]:
        """By structured name, as in a checkpoint; before the first step those that were set."""
        return self._step.state_dict()["optimizer"] if self._is_built else dict(self._moments)

    def set_moments(self, moments: dict[str, Any]) -> None:
        """Go on from `moments`, by structured name, and the weights that `model` has now."""
        self._moments = moments
        if self._is_built:
            self._hand_over()

    def write_back(self) -> None:
        """Copy parameters and buffers from the Program to `model`."""
        if not self._is_built:
            return
        targets = self.model.state_dict()
        with paddle.no_grad():
            for name, array in self._step.state_dict()["model"].items():
                targets[name].set_value(array)

    def _build(self, micro_batch: Batch) -> None:
        before = RngState.capture()
        self._step.build(micro_batch)
        before.restore()
        self._is_built = True
        self._hand_over()

    def _hand_over(self) -> None:
        state: dict[str, Any] = {"model": self.model.state_dict()}
        if self._moments:
            state["optimizer"] = self._moments
        self._step.set_state_dict(state)
        self._moments = {}


class ProgramOptimizer:
    """The moments of a `ProgramStep`, as a checkpoint reads and writes those of an optimizer."""

    def __init__(self, step: ProgramStep, schedule: lr.LRScheduler | float) -> None:
        self._step = step
        self._schedule = schedule

    def get_lr(self) -> float:
        """The learning rate in force."""
        return float(
            self._schedule() if isinstance(self._schedule, lr.LRScheduler) else self._schedule
        )

    def state_dict(self) -> dict[str, Any]:
        """As of ``paddle.optimizer.Optimizer``."""
        parameters = dict(self._step.model.named_parameters())
        state = {}
        for key, array in self._step.moments().items():
            name, _, kind = key.partition(":")
            state[f"{parameters[name].name}_{kind}_0"] = paddle.to_tensor(array)
        return state

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """As of ``paddle.optimizer.Optimizer``."""
        moments = {}
        for name, parameter in self._step.model.named_parameters():
            prefix = f"{parameter.name}_"
            for key, value in state.items():
                if key.startswith(prefix) and key.endswith("_0"):
                    moments[f"{name}:{key[len(prefix) : -len('_0')]}"] = value
        self._step.set_moments(moments)


class ProgramSync:
    """In place of a `GradientSync`: the gradients of a Program are exchanged by its operators."""

    mode = "program"
    reason = "its operators average the gradients of the ranks"

    def state_dict(self) -> dict[str, Any]:
        """Nothing is owed from one step to the next."""
        return {"residuals": {}}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to restore."""
