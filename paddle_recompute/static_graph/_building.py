"""What every Program of a `StaticTrainStep` is built from: the model, the optimizer, the names."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import paddle
from paddle.optimizer import lr

from paddle_recompute._paddle.static import training
from paddle_recompute.config import Config
from paddle_recompute.recompute import apply_recompute
from paddle_recompute.train_step import OF_LOSS, decayed_parameters, make_optimizer


@dataclass(frozen=True)
class Recipe:
    """How the Programs of one step are built. Those that share a scope share their parameters: the
    names are the same in each.

    Attributes:
        config: The configuration.
        model_fn: Returns the model, a Layer.
        schedule: The learning rate.
        recompute_with: Wraps parts of the model; None: as ``config.recompute`` says.
    """

    config: Config
    model_fn: Callable[[], paddle.nn.Layer]
    schedule: lr.LRScheduler | float
    recompute_with: Callable[[paddle.nn.Layer], object] | None

    @contextlib.contextmanager
    def program(self) -> Iterator[tuple[paddle.static.Program, paddle.static.Program]]:
        """A new Program and its startup Program, which are built inside."""
        main, startup = paddle.static.Program(), paddle.static.Program()
        # Auto-generated names must be equal on all ranks; our checkpoints use structured names.
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
            yield main, startup

    def model(self, *, recompute: bool) -> paddle.nn.Layer:
        """The model in the Program that is being built; with `recompute` its parts are wrapped."""
        model = self.model_fn()
        if recompute and self.config.recompute.enable:
            if self.recompute_with is not None:
                self.recompute_with(model)
            else:
                apply_recompute(model, self.config.recompute)
        return model

    def mixed_precision(self) -> contextlib.AbstractContextManager[None]:
        """Around what is added to a Program in mixed precision, if there is one."""
        amp = self.config.strategy.amp_configs if self.config.strategy.amp else None
        lists = amp.model_dump(include={"custom_white_list", "custom_black_list"}) if amp else {}
        return training.building_in(amp.dtype if amp is not None else None, **lists)

    def optimizer(
        self, model: paddle.nn.Layer, loss: Any, startup: paddle.static.Program
    ) -> tuple[Any, Any]:
        """The optimizer of the model's parameters, and the variable with the norm of the gradient.

        Args:
            model: The model.
            loss: What it will minimize.
            startup: Where its variables are made.
        """
        parameters = trained_parameters(model)
        clip = training.GradientNorm(
            self.config.train.clip_grad_norm or math.inf,
            [parameter.name for parameter in parameters],
            loss,
            startup,
        )
        made = make_optimizer(
            self.config, self.schedule, parameters, decayed_parameters(model), grad_clip=clip
        )
        return made, clip.norm


def trained_parameters(model: paddle.nn.Layer) -> list[Any]:
    """The parameters of `model` that are not frozen; those of the loss last, as in dygraph, where
    the order decides the last bit of the gradient norm.
    """
    trained = [(name, one) for name, one in model.named_parameters() if not one.stop_gradient]
    return [one for _, one in sorted(trained, key=lambda pair: pair[0].startswith(OF_LOSS))]


def names_in_scope(model: paddle.nn.Layer, optimizer: Any) -> dict[str, dict[str, str]]:
    """The variables of the trained state, by section and by name in a state."""
    # A Layer with two names has both in the state, and one of them among the parameters.
    in_state = {name: str(variable.name) for name, variable in model.state_dict().items()}
    structured = {parameter.name: name for name, parameter in model.named_parameters()}
    moments = {
        f"{structured[parameter]}:{kind}": variable
        for (parameter, kind), variable in training.accumulators(optimizer).items()
    }
    return {"model": in_state, "optimizer": moments}
