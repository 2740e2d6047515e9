"""Sublayers that another batch would call: idle experts of a mixture of experts.

One batch cannot tell an expert without tokens from a layer that the forward never calls. So the
forward is repeated with other weights. If values decide what is called, other layers are called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import paddle

from paddle_recompute._paddle.layers import is_initialized
from paddle_recompute.doctor.observation import Array, Observation, State, observe

_NOISY_TRIALS = 4
_ROLLED_TRIALS = 2
_LEAST_NOISE = 0.05  # for weights that are all equal, such as those of a gate at its start


@dataclass(frozen=True)
class Idle:
    """Sublayers that are not called in a step, but may be in another step."""

    parts: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        """Whether `name` is one of these sublayers, or a sublayer or parameter in one."""
        places = name.split(".")
        return any(".".join(places[:end]) in self.parts for end in range(1, len(places) + 1))


def idle_parts(
    model: paddle.nn.Layer,
    state: State,
    plain: Observation,
    forward: Callable[[], paddle.Tensor],
) -> Idle:
    """The idle sublayers of `model` in the step `plain`. All ranks call this together.

    Args:
        model: Its parameters and buffers are changed and put back.
        state: What each step starts from.
        plain: The step with the weights as they are.
        forward: Returns the loss.
    """
    usual = plain.calls().keys()
    changing: set[str] = set()
    for trial in range(_NOISY_TRIALS + _ROLLED_TRIALS):

        def disturbed(trial: int = trial) -> paddle.Tensor:
            if trial < _NOISY_TRIALS:
                _add_noise(model, np.random.default_rng(trial))
            else:
                _roll(model, trial - _NOISY_TRIALS + 1)
            return forward()

        seen = observe(model, state, disturbed, backward=False)
        if seen.error is None:
            changing |= usual ^ seen.calls().keys()
    layers = dict(model.named_sublayers())
    routed = {(_parent(name), type(layers[name])) for name in changing}
    return Idle(
        frozenset(
            name
            for name, layer in layers.items()
            if (_parent(name), type(layer)) in routed and name not in usual
        )
    )


def _add_noise(model: paddle.nn.Layer, random: np.random.Generator) -> None:
    """Add noise as large as the spread of each weight."""
    for parameter in model.parameters():

        def noisy(value: Array) -> Array:
            scale = max(float(value.std()), _LEAST_NOISE)
            added: Array = scale * random.standard_normal(value.shape, dtype="float32")
            return value + added

        _change(parameter, noisy)


def _roll(model: paddle.nn.Layer, steps: int) -> None:
    """Give each output of a layer the weights and the bias of another output.

    A gate that prefers one expert by far keeps its choice under noise; now it prefers another one.
    The preference may also be in a buffer.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        _change(tensor, lambda value: np.roll(value, steps, -1) if value.ndim else value)


def _change(tensor: paddle.Tensor, change: Callable[[Array], Array]) -> None:
    if tensor.is_floating_point() and is_initialized(tensor):
        with paddle.no_grad():
            changed = change(tensor.astype("float32").numpy())
            tensor.set_value(paddle.to_tensor(changed).astype(tensor.dtype))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
