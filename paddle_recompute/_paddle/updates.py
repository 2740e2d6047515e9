"""An optimizer's state, and its step that a tensor on the device can turn into none.

Paddle's own way, ``optimizer._set_auxiliary_var("found_inf", tensor)``, reads the tensor on the
host in dygraph (2.6, 3.x): ``Optimizer`` asks ``if found_inf``, Adam and AdamW hand it to their
kernels in a Program alone, and there the kernels of GPUs copy it to the host, once for each
parameter.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter, itemgetter
from typing import Any

import paddle

from paddle_recompute._paddle.flat import Gradients
from paddle_recompute._paddle.layers import (
    clips_of_optimizer,
    parameters_of_optimizer,
    with_inner_optimizers,
)
from paddle_recompute.errors import ConfigError

_HALF = frozenset((paddle.float16, paddle.bfloat16))
_KEEPS_AT_RATE_0 = (
    paddle.optimizer.SGD,
    paddle.optimizer.Momentum,
    paddle.optimizer.Adam,
    paddle.optimizer.AdamW,
)


MASTERS, SCHEDULE = "master_weights", "LR_Scheduler"
"""What ``Optimizer.state_dict`` (2.6, 3.x) has besides the tensors of a parameter."""


def parameter_of_state(key: str, names: Iterable[str]) -> str:
    """Which of `names` is the parameter's that the entry `key` of a state belongs to; "": none.

    ``Optimizer.state_dict`` (2.6, 3.x) names it ``linear_0.w_0_moment1_0``. Can go when it says the
    parameter by itself.
    """
    return max((name for name in names if key.startswith(f"{name}_")), key=len, default="")


def part_of_state(
    state: Mapping[str, Any], owners: Mapping[str, str], own: Collection[str]
) -> dict[str, Any]:
    """What of `state` is of the parameters `own`, and the schedule.

    Args:
        state: Of an optimizer.
        owners: `parameter_of_state` of each key, but of `MASTERS` and `SCHEDULE`.
        own: Names of parameters.
    """
    part = {key: state[key] for key, owner in owners.items() if owner in own}
    masters = {name: master for name, master in state.get(MASTERS, {}).items() if name in own}
    if masters:
        part[MASTERS] = masters
    if SCHEDULE in state:
        part[SCHEDULE] = state[SCHEDULE]
    return part


def prefix_of_moments(optimizer: Any) -> str:
    """What comes before "moment1" where ``name=`` was given: ``Optimizer._name`` (2.6, 3.x)."""
    name = getattr(optimizer, "_name", None)
    return f"{name}_" if name else ""


def give_moments_one_by_one(optimizer: Any) -> None:
    """Let `optimizer` start a parameter anew, if the state that it was given has none of it.

    ``Optimizer._add_accumulator`` (2.6, 3.x) raises AssertionError where moments of a parameter are
    not in the state and those of another one still wait in it; and where the number at the end of a
    name is not 0, as where the same parameters had an optimizer before. Can go when it does not.
    """
    optimizer._add_accumulator = types.MethodType(_add_accumulator, optimizer)


def _add_accumulator(optimizer: Any, name: str, param: Any, *args: Any, **named: Any) -> Any:
    waiting, optimizer._accumulators_holder = optimizer._accumulators_holder, {}
    try:
        added = type(optimizer)._add_accumulator(optimizer, name, param, *args, **named)
    finally:
        optimizer._accumulators_holder = waiting
    if (given := waiting.pop(f"{param.name}_{name}_0", None)) is not None:
        added.set_value(given)
    return added


def check_treats_each_alone(optimizer: Any, seen: str) -> None:
    """Check that `optimizer` updates each parameter by itself.

    Args:
        optimizer: Of Paddle.
        seen: What it sees of all parameters and gradients, in words.

    Raises:
        ConfigError: It is LBFGS, or clips by anything but the value or the norm of each gradient.
    """
    if any(isinstance(inner, paddle.optimizer.LBFGS) for inner in with_inner_optimizers(optimizer)):
        raise ConfigError(
            f"the optimizer is LBFGS, which looks at all parameters at once, and sees {seen}. Use "
            "one that treats each parameter by itself"
        )
    for clip in clips_of_optimizer(optimizer):
        if type(clip) not in _CLIPS_OF_EACH:
            raise ConfigError(
                f"the optimizer clips with {type(clip).__name__} (grad_clip of it, of a parameter "
                f"group, or of an optimizer inside of it), and sees {seen}; take grad_clip out, "
                "and use TrainStep(clip_grad_norm=...) to clip by the norm of all gradients"
            )


_CLIPS_OF_EACH = (paddle.nn.ClipGradByValue, paddle.nn.ClipGradByNorm)
"""What treats each gradient by itself."""


def keeps_parameters_at_rate_0(optimizer: Any) -> bool:
    """Whether `optimizer` leaves parameters alone at learning rate 0 with gradients of 0.

    Not of a subclass, which may do anything; nor of RMSProp, whose momentum has the rate in it.
    """
    return type(optimizer) in _KEEPS_AT_RATE_0


@contextlib.contextmanager
def learning_rate_times(optimizer: Any, factor: paddle.Tensor) -> Iterator[None]:
    """Inside, ``optimizer.step`` multiplies its learning rates by `factor`, on the device.

    ``Optimizer._create_param_lr`` (2.6, 3.x) returns the rate of a parameter as a tensor. Can go
    when an optimizer takes a tensor that says whether to update, and does not read it.

    Args:
        optimizer: One that `keeps_parameters_at_rate_0`.
        factor: One number.
    """
    rate_of = optimizer._create_param_lr
    known: dict[int, tuple[paddle.Tensor, paddle.Tensor]] = {}
    common: list[paddle.Tensor] = []

    def scaled(param_and_grad: Any) -> paddle.Tensor:
        rate = rate_of(param_and_grad)
        if id(rate) not in known:
            known[id(rate)] = rate, rate * factor.astype(rate.dtype)
        return known[id(rate)][1]

    def scaled_alike(param_and_grad: Any) -> paddle.Tensor:
        if not common:  # not before Paddle has set the rate of this step
            common.append(scaled(param_and_grad))
        return common[0]

    optimizer._create_param_lr = scaled_alike if _has_one_rate(optimizer) else scaled
    try:
        yield
    finally:
        del optimizer._create_param_lr


def _has_one_rate(optimizer: Any) -> bool:
    """Whether no parameter of `optimizer` has a factor of its learning rate (``optimize_attr``)."""
    parameters = parameters_of_optimizer(optimizer)
    try:
        return {*map(_FACTOR, map(_ATTRIBUTES, parameters))} == {1.0}
    except (AttributeError, KeyError, TypeError):  # a tensor that has none
        return False


_ATTRIBUTES, _FACTOR = attrgetter("optimize_attr"), itemgetter("learning_rate")


@paddle.no_grad()
def zero_if(condition: paddle.Tensor, tensors: Gradients) -> None:
    """Write zeros into `tensors`, which are in one place, where `condition` is true, on the device;
    else they stay as they are.

    ``_C_ops.update_loss_scaling_`` (2.6, 3.x) does this to the gradients of a step that overflowed,
    before it moves the scale, which is left out here. On a CPU it makes no pass over them, where
    ``paddle.where`` takes more time than AdamW. It has kernels for CPUs and GPUs; where Paddle runs
    the kernel of the CPU for another device, the zeros stay on the host (seen with the simulated
    one). Can go when a public in-place operator takes a condition of one element.

    Args:
        condition: Bool, one element.
        tensors: By their floating dtypes.
    """
    for dtype, alike in tensors.items():
        place, is_half = alike[0].place, dtype in _HALF
        if place.is_gpu_place() or (place.is_cpu_place() and not is_half):
            paddle._C_ops.update_loss_scaling_(
                alike, condition.reshape([1]), *_unmoved(str(place), dtype), 1, 1, 1.0, 1.0, True
            )
            continue
        for tensor in alike:
            wide = tensor.astype("float32") if is_half else tensor
            wide = paddle.where(condition, paddle.zeros_like(wide), wide)
            paddle.assign(wide.astype(dtype) if is_half else wide, tensor)


@functools.cache
def _unmoved(place: str, dtype: Any) -> tuple[paddle.Tensor, ...]:
    """Loss scale, good and bad steps in a row, which the operator is asked to leave."""
    return paddle.ones([1], dtype), paddle.zeros([1], "int32"), paddle.zeros([1], "int32")


def keeps_master_weights(optimizer: Any) -> bool:
    """Whether `optimizer` keeps float32 copies of half-precision parameters.

    ``Optimizer._multi_precision`` (2.6, 3.x); before the first step nothing public tells it. Can go
    when something does.
    """
    return bool(getattr(optimizer, "_multi_precision", False))
