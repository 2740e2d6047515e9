"""Parts that this batch does not call and another would: idle experts of a mixture of experts.

One batch cannot tell an expert that got no token from a layer that was forgotten. So the forward is
repeated with other weights: where the values decide what is called, other parts are called then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import paddle

from paddle_recompute import _paddle
from paddle_recompute.doctor.observation import Observation, State, observe

_TRIALS = 4
_LEAST_NOISE = 0.05  # for weights that are all equal, such as those of a gate at its start


@dataclass(frozen=True)
class Idle:
    """Which sublayers are not called in a step, although they may be in another one."""

    parts: frozenset[str] = frozenset()

    def has(self, name: str) -> bool:
        """Whether the sublayer or parameter `name` is one of them, or in one of them."""
        places = name.split(".")
        return any(".".join(places[:end]) in self.parts for end in range(1, len(places) + 1))


def idle_parts(
    model: paddle.nn.Layer,
    state: State,
    plain: Observation,
    forward: Callable[[], paddle.Tensor],
) -> Idle:
    """The parts of `model` that are idle in `plain`; all ranks call this together.

    Args:
        model: Its parameters are changed and put back.
        state: What each step starts from.
        plain: The step with the weights as they are.
        forward: Returns the loss.
    """
    usual = plain.calls().keys()
    changing: set[str] = set()
    for trial in range(_TRIALS):

        def disturbed(trial: int = trial) -> paddle.Tensor:
            _disturb(model, np.random.default_rng(trial))
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


def _disturb(model: paddle.nn.Layer, random: np.random.Generator) -> None:
    with paddle.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and _paddle.is_initialized(parameter):
                value = parameter.astype("float32").numpy()
                scale = max(float(value.std()), _LEAST_NOISE)
                noisy = value + scale * random.standard_normal(value.shape, dtype="float32")
                parameter.set_value(paddle.to_tensor(noisy).astype(parameter.dtype))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
