"""What every Program of a `StaticTrainStep` is built from: the model, the optimizer, the names."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import paddle
from numpy.typing import NDArray
from paddle.optimizer import lr

from paddle_recompute._paddle.static import buffers, native, training
from paddle_recompute._paddle.static.compiled import CONVERSION_ERRORS
from paddle_recompute.errors import PaddleRecomputeError, StaticGraphError, first_sentence
from paddle_recompute.recompute import apply_recompute, first_wrapped_part, undo_recompute
from paddle_recompute.static_graph._trained_program import ScopeState
from paddle_recompute.static_graph.options import StaticConfig
from paddle_recompute.train_step import LOSS_PREFIX, decayed_parameters, make_optimizer


@dataclass(frozen=True)
class ProgramBuilder:
    """How the Programs of one step are built. Those that share a scope share their parameters: the
    names are the same in each.

    Attributes:
        config: What it trains with.
        model_fn: Returns the model, a Layer.
        schedule: The learning rate.
        recompute_with: Wraps parts of the model; None: as ``config.recompute`` says.
        first_values: Of the buffers that `model` has found, by variable; the startup Program
            knows zeros only.
        state: Of a Program that has the same variables, which is run on them; None: on its own.
    """

    config: StaticConfig
    model_fn: Callable[[], paddle.nn.Layer]
    schedule: lr.LRScheduler | float
    recompute_with: Callable[[paddle.nn.Layer], object] | None
    first_values: dict[str, NDArray[Any]] = field(default_factory=dict)
    state: ScopeState | None = None

    def in_float32(self, state: ScopeState) -> ProgramBuilder:
        """For the same Program without mixed precision, on the variables of `state`."""
        config = dataclasses.replace(self.config, amp=None)
        return dataclasses.replace(self, config=config, first_values={}, state=state)

    def started(
        self, startup: paddle.static.Program, variables: dict[str, dict[str, str]]
    ) -> ScopeState:
        """The state of a Program whose variables `startup` makes.

        Args:
            startup: What makes them.
            variables: As of `ScopeState`.
        """
        if self.state is not None:
            return dataclasses.replace(self.state, variables=variables)
        return ScopeState.started(startup, variables, self.first_values)

    @contextlib.contextmanager
    def program(self) -> Iterator[tuple[paddle.static.Program, paddle.static.Program]]:
        """A new Program and its startup Program, which are built inside."""
        main, startup = paddle.static.Program(), paddle.static.Program()
        # Auto-generated names must be equal on all ranks; our checkpoints use structured names.
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
            yield main, startup

    def model(self, *, recompute: bool) -> paddle.nn.Layer:
        """The model in the Program that is being built; with `recompute` its parts are wrapped."""
        with converted("model_fn"), buffers.of_variables():
            model = self.model_fn()
        with converted("a buffer of the model"):
            self.first_values.update(buffers.keep(model))
        if recompute:
            self._wrap(model)
        return model

    @contextlib.contextmanager
    def recomputing(self, model: paddle.nn.Layer) -> Iterator[None]:
        """Inside, parts of the dygraph `model` are wrapped as those of the Program's are, unless
        it is wrapped already.
        """
        if first_wrapped_part(model) is not None:
            yield
            return
        self._wrap(model)
        try:
            yield
        finally:
            undo_recompute(model)

    def _wrap(self, model: paddle.nn.Layer) -> None:
        if not self.config.recompute.enable:
            return
        if self.recompute_with is not None:
            self.recompute_with(model)
        else:
            apply_recompute(model, self.config.recompute).stop_watching()

    def mixed_precision(self) -> contextlib.AbstractContextManager[None]:
        """Around what is added to a Program in mixed precision, if there is one."""
        amp = self.config.amp
        if amp is None:
            return contextlib.nullcontext()
        inside: contextlib.AbstractContextManager[None] = native().building_in(
            amp.dtype,
            custom_white_list=amp.custom_white_list,
            custom_black_list=amp.custom_black_list,
        )
        return inside

    @property
    def dtype(self) -> str | None:
        """In which operators compute in mixed precision; None without."""
        return self.config.amp.dtype if self.config.amp is not None else None

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
            self.config.clip_grad_norm or math.inf,
            [parameter.name for parameter in parameters],
            loss,
            startup,
        )
        made = make_optimizer(
            self.config.optimizer,
            self.schedule,
            parameters,
            decayed_parameters(model),
            grad_clip=clip,
        )
        return made, clip.norm


def trained_parameters(model: paddle.nn.Layer) -> list[Any]:
    """The parameters of `model` that are not frozen; those of the loss last, as in dygraph, where
    the order decides the last bit of the gradient norm.
    """
    trained = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if not parameter.stop_gradient
    ]
    return [
        parameter
        for _, parameter in sorted(trained, key=lambda pair: pair[0].startswith(LOSS_PREFIX))
    ]


def modes_of(model: paddle.nn.Layer) -> dict[str, bool]:
    """Which sublayers are in ``train()``, by name."""
    return {name: layer.training for name, layer in model.named_sublayers(include_self=True)}


def names_in_scope(model: paddle.nn.Layer, optimizer: Any) -> dict[str, dict[str, str]]:
    """Names in the scope of the trained variables, by section of the state and name in it."""
    # A Layer with two names has both in the state, and one of them among the parameters.
    # ``_dropout_state`` of a recurrent Layer (3.3) has no numbers, and no place in dygraph's state.
    in_state = {
        name: str(variable.name)
        for name, variable in model.state_dict().items()
        if 0 not in variable.shape
    }
    structured = {parameter.name: name for name, parameter in model.named_parameters()}
    moments = {
        f"{structured[parameter]}:{kind}": variable
        for (parameter, kind), variable in training.accumulators(optimizer).items()
    }
    return {"model": in_state, "optimizer": moments}


@contextlib.contextmanager
def converted(what: str) -> Iterator[None]:
    """Inside, the user's code builds a Program; an error of the conversion names `what`."""
    try:
        with native().refusing_truth():
            yield
        if line := native().lost_write(paddle.static.default_main_program()):
            raise StaticGraphError(
                f"{what} cannot be built as a Program: {line} writes to a tensor whose gradient is "
                "needed, and the backward of Paddle 3.3 passes by it, so gradients would be wrong. "
                "Make a new tensor instead (paddle.where, paddle.concat), or train this model in "
                "dygraph (mode: dygraph)"
            )
    except PaddleRecomputeError:
        raise
    except CONVERSION_ERRORS as error:
        raise StaticGraphError(
            f"{what} cannot be built as a Program: {first_sentence(error)}. Not everything that "
            "runs in dygraph can be in a Program (a PyLayer cannot); train this model in dygraph "
            "(mode: dygraph)"
        ) from error
