"""Moments and master weights of a Paddle optimizer under structured names.

Paddle names them after ``linear_7.w_0``, a number that counts the layers made so far in this
process: under those names a state could only be read by the very same program.

A state is whole or refused. Paddle makes the moments of a parameter in its first update, so one
that never had a gradient has none: `NOT_UPDATED` says so in the state. Any other parameter without
moments was lost on the way, as where the state is spread over ranks.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import paddle

from paddle_recompute._paddle.layers import parameters_of_optimizer
from paddle_recompute._paddle.updates import (
    MASTERS,
    SCHEDULE,
    give_moments_one_by_one,
    parameter_of_state,
    prefix_of_moments,
)
from paddle_recompute.distributed import gathered
from paddle_recompute.errors import CheckpointError
from paddle_recompute.offload import OffloadOptimizer
from paddle_recompute.sharding import ShardedOptimizer, inner_of
from paddle_recompute.train_step.gradients import HALF
from paddle_recompute.train_step.step import LOSS_PREFIX, NOT_UPDATED

# Paddle numbers them: "moment1_0", and "fp32_master_0_moment1_0" where there is a master weight.
_ACCUMULATOR = re.compile(r"(?:fp32_master_\d+_)?(.+)_\d+")
_MASTER = "fp32_master"
_OF_ADAM = {"moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"}


def structured_parameters(
    model: paddle.nn.Layer, loss: paddle.nn.Layer | None
) -> dict[str, paddle.Tensor]:
    """Parameters by structured name, those of `loss` with `LOSS_PREFIX` in front."""
    of_model = dict(model.named_parameters())
    if isinstance(model, paddle.DataParallel):
        of_model = {name.removeprefix("_layers."): key for name, key in of_model.items()}
    of_loss = loss.named_parameters() if loss is not None else ()
    return of_model | {f"{LOSS_PREFIX}{name}": parameter for name, parameter in of_loss}


def state_of(
    optimizer: paddle.optimizer.Optimizer | ShardedOptimizer,
    parameters: Mapping[str, paddle.Tensor],
    *,
    updated: Collection[str] = (),
    loaded: Mapping[str, Any] | None = None,
    keep: bool = True,
) -> dict[str, Any]:
    """The optimizer's tensors by structured name, ``"norm.weight:moment1"``; no copies.

    Args:
        optimizer: Any of Paddle's, or one whose state is gathered from the ranks here.
        parameters: What it updates, by structured name.
        updated: Paddle's names of the parameters that it has updated.
        loaded: What `set_state_of` returned: Paddle does not show the moments that it was given
            for a parameter until it updates that parameter.
        keep: Whether this rank wants a state that is gathered; False: it gets an empty one.

    Raises:
        CheckpointError: It has a tensor that belongs to none of them, or lacks moments of one that
            it has updated.
    """
    structured = {parameter.name: name for name, parameter in parameters.items()}
    prefix = prefix_of_moments(_optimizers_of(optimizer)[0])
    state = {}
    for key, tensor in _own_state_of(optimizer).items():
        if key == SCHEDULE:
            continue
        if key == MASTERS:
            for owner, master in tensor.items():
                state[f"{structured[owner]}:{_MASTER}"] = master
            continue
        owner = parameter_of_state(key, structured)
        accumulator = _ACCUMULATOR.fullmatch(key[len(owner) + 1 :]) if owner else None
        if accumulator is None:
            raise CheckpointError(f"the optimizer state {key!r} belongs to no parameter")
        state[f"{structured[owner]}:{accumulator[1].removeprefix(prefix)}"] = tensor
    for key, value in (loaded or {}).items():
        if parameters[key.partition(":")[0]].name not in updated:
            state.setdefault(key, value)
    if isinstance(optimizer, ShardedOptimizer):
        state = optimizer.gathered(state, keep=keep)
        if not keep:
            return {}
    elif isinstance(optimizer, OffloadOptimizer) and optimizer.is_spread:
        names = {name for name, p in parameters.items() if p.name in optimizer.shared}
        common = {k: moment for k, moment in state.items() if k.partition(":")[0] in names}
        rest = {key: moment for key, moment in state.items() if key not in common}
        state = {**common, **gathered(rest, None, keep)}
        if not keep:
            return {}
    found = _accumulators(state)
    kinds = set().union(*found.values())
    for name, parameter in parameters.items():
        missing = sorted(kinds - found.get(name, set()))
        if missing and (name in found or parameter.name in updated):
            raise CheckpointError(
                f"the optimizer has updated {name} and has no {missing[0]} of it, so its state is "
                "not whole: a checkpoint of it would lose moments. Under fleet's sharding each "
                "rank has the state of some parameters only; use sharding_degree: 1"
            )
        if missing:
            state[f"{name}:{NOT_UPDATED}"] = paddle.zeros([1])
    return state


def set_state_of(
    optimizer: paddle.optimizer.Optimizer | ShardedOptimizer,
    parameters: Mapping[str, paddle.Tensor],
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """Give `optimizer`, which has made no step yet, the `state` of `state_of`, bit by bit.

    A parameter that was in half precision and is in float32 now gets its master weight. One that
    was in float32 and is in half precision now is rounded, and its master weight starts from that.
    The learning rate is left alone. Of a `ShardedOptimizer` each rank takes what it owns.

    Returns:
        The moments that were taken, for `state_of`.

    Raises:
        CheckpointError: There is no parameter of a name in `state`, a parameter lacks moments
            without being marked as `NOT_UPDATED`, or has one of another shape.
    """
    prefix = prefix_of_moments(_optimizers_of(optimizer)[0])  # earlier versions kept it
    keys = (key.partition(":") for key in state)
    names = (f"{name}:{accumulator.removeprefix(prefix)}" for name, _, accumulator in keys)
    state = dict(zip(names, state.values(), strict=True))
    _check_complete(parameters, state, optimizer)
    moments: dict[str, Any] = {}
    given: dict[str, Any] = {}
    masters: dict[str, paddle.Tensor] = {}
    for key, value in state.items():
        name, _, accumulator = key.partition(":")
        if accumulator == NOT_UPDATED:
            continue
        parameter = parameters[name]
        is_half = parameter.dtype in HALF
        # The moments are named after the master weight, where the optimizer keeps one.
        owner = f"{parameter.name}_{_MASTER}_0" if is_half else parameter.name
        is_spread = isinstance(optimizer, ShardedOptimizer | OffloadOptimizer)
        is_owned = not is_spread or parameter.name in optimizer.owned
        if accumulator != _MASTER:
            if not is_owned:
                continue
            moments[f"{owner}_{accumulator}_0"] = given[key] = value
        elif is_half and is_owned:
            masters[parameter.name] = paddle.to_tensor(value)
            masters[parameter.name].name = owner
        elif not is_half:
            parameter.set_value(value)
    if masters:
        moments[MASTERS] = masters
    # Paddle insists on the state of a scheduler that the optimizer has: give it its own back.
    optimizer = inner_of(optimizer)
    schedule = _own_state_of(optimizer).get(SCHEDULE)
    with warnings.catch_warnings():
        # Of LinearWarmup's own state it says that it holds "unused values" (2.6, 3.x).
        warnings.filterwarnings("ignore", "There are some unused values", UserWarning)
        optimizer.set_state_dict({**moments, **({SCHEDULE: schedule} if schedule else {})})
    for inner in _optimizers_of(optimizer):
        give_moments_one_by_one(inner)
    return given


def _optimizers_of(optimizer: Any) -> list[paddle.optimizer.Optimizer]:
    """Those of Paddle that `optimizer` consists of."""
    is_several = isinstance(optimizer, OffloadOptimizer)
    return optimizer.optimizers if is_several else [inner_of(optimizer)]


def _own_state_of(optimizer: Any) -> dict[str, Any]:
    """The state of what this rank updates, under Paddle's names."""
    if isinstance(optimizer, OffloadOptimizer):
        return optimizer.own_state_dict()
    state: dict[str, Any] = inner_of(optimizer).state_dict()
    return state


def _accumulators(state: Mapping[str, Any]) -> dict[str, set[str]]:
    """The kinds of moments of each parameter that has any."""
    found: dict[str, set[str]] = {}
    for key in state:
        name, _, accumulator = key.partition(":")
        if accumulator not in (_MASTER, NOT_UPDATED):
            found.setdefault(name, set()).add(accumulator)
    return found


def _check_complete(
    parameters: Mapping[str, paddle.Tensor],
    state: Mapping[str, Any],
    optimizer: paddle.optimizer.Optimizer | ShardedOptimizer,
) -> None:
    """A parameter has all kinds of moments or, if it never had a gradient, none and a mark."""
    for key, value in state.items():
        name = key.partition(":")[0]
        if name not in parameters:
            raise CheckpointError(f"the optimizer state holds {key}, and the model has no {name}")
        shape = list(parameters[name].shape)
        is_of_batches = list(value.shape)[1:] == shape  # the gradients that ASGD averages
        if list(value.shape) not in (shape, [1], []) and not is_of_batches:
            raise CheckpointError(
                f"the optimizer state holds {key} of the shape {list(value.shape)}, and the "
                f"parameter has the shape {shape}"
            )
    found = _accumulators(state)
    kinds = set().union(*found.values())
    if found and isinstance(inner_of(optimizer), paddle.optimizer.Adam | paddle.optimizer.AdamW):
        kinds |= _OF_ADAM
    of_optimizer = {id(parameter) for parameter in parameters_of_optimizer(optimizer)}
    for name, parameter in parameters.items():
        is_updated = not parameter.stop_gradient and (
            not of_optimizer or id(parameter) in of_optimizer
        )
        is_needed = name in found or (is_updated and f"{name}:{NOT_UPDATED}" not in state)
        missing = sorted(kinds - found.get(name, set()))
        if is_needed and missing:
            raise CheckpointError(
                f"the optimizer state lacks {name}:{missing[0]}: it is not whole, as of one rank "
                "of several that share the state; resume from another checkpoint. If the parameter "
                "is new, freeze it (stop_gradient), or start the optimizer anew"
            )
