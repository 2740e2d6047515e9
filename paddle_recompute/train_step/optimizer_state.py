"""Moments and master weights of a Paddle optimizer under structured names.

Paddle names them after ``linear_7.w_0``, a number that counts the layers made so far in this
process: under those names a state could only be read by the very same program.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

import paddle

from paddle_recompute.errors import CheckpointError
from paddle_recompute.train_step.step import OF_LOSS

# Paddle numbers them: "moment1_0", and "fp32_master_0_moment1_0" where there is a master weight.
_ACCUMULATOR = re.compile(r"(?:fp32_master_\d+_)?(.+)_\d+")
_MASTER = "fp32_master"
_OF_ADAM = {"moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"}
_HALF = (paddle.float16, paddle.bfloat16)


def structured_parameters(
    model: paddle.nn.Layer, loss: paddle.nn.Layer | None
) -> dict[str, paddle.Tensor]:
    """Parameters by structured name, those of `loss` with `OF_LOSS` in front."""
    of_model = dict(model.named_parameters())
    if isinstance(model, paddle.DataParallel):
        of_model = {name.removeprefix("_layers."): one for name, one in of_model.items()}
    of_loss = loss.named_parameters() if loss is not None else ()
    return of_model | {f"{OF_LOSS}{name}": parameter for name, parameter in of_loss}


def state_of(
    optimizer: paddle.optimizer.Optimizer, parameters: Mapping[str, paddle.Tensor]
) -> dict[str, paddle.Tensor]:
    """The optimizer's tensors by structured name, ``"norm.weight:moment1"``; no copies.

    Args:
        optimizer: Any of Paddle's.
        parameters: What it updates, by structured name.

    Raises:
        CheckpointError: It has a tensor that belongs to none of them.
    """
    structured = {parameter.name: name for name, parameter in parameters.items()}
    state = {}
    for key, tensor in optimizer.state_dict().items():
        if key == "LR_Scheduler":
            continue
        if key == "master_weights":
            for owner, master in tensor.items():
                state[f"{structured[owner]}:{_MASTER}"] = master
            continue
        owner = max((p for p in structured if key.startswith(f"{p}_")), key=len, default=None)
        accumulator = _ACCUMULATOR.fullmatch(key[len(owner) + 1 :]) if owner else None
        if owner is None or accumulator is None:
            raise CheckpointError(f"the optimizer state {key!r} belongs to no parameter")
        state[f"{structured[owner]}:{accumulator[1]}"] = tensor
    return state


def set_state_of(
    optimizer: paddle.optimizer.Optimizer,
    parameters: Mapping[str, paddle.Tensor],
    state: Mapping[str, Any],
) -> None:
    """Give `optimizer`, which has made no step yet, the `state` of `state_of`, bit by bit.

    A parameter that was in half precision and is in float32 now gets its master weight. One that
    was in float32 and is in half precision now is rounded, and its master weight starts from that.
    The learning rate is left alone.

    Raises:
        CheckpointError: There is no parameter of a name in `state`, a parameter has some of its
            moments only, or one of another shape.
    """
    _check_complete(parameters, state, optimizer)
    moments: dict[str, Any] = {}
    masters: dict[str, paddle.Tensor] = {}
    for key, value in state.items():
        name, _, accumulator = key.partition(":")
        parameter = parameters[name]
        is_half = parameter.dtype in _HALF
        # The moments are named after the master weight, where the optimizer keeps one.
        owner = f"{parameter.name}_{_MASTER}_0" if is_half else parameter.name
        if accumulator != _MASTER:
            moments[f"{owner}_{accumulator}_0"] = value
        elif is_half:
            masters[parameter.name] = paddle.to_tensor(value)
            masters[parameter.name].name = owner
        else:
            parameter.set_value(value)
    if masters:
        moments["master_weights"] = masters
    # Paddle insists on the state of a scheduler that the optimizer has: give it its own back.
    schedule = optimizer.state_dict().get("LR_Scheduler")
    with warnings.catch_warnings():
        # Of LinearWarmup's own state it says that it holds "unused values" (2.6, 3.x).
        warnings.filterwarnings("ignore", "There are some unused values", UserWarning)
        optimizer.set_state_dict({**moments, **({"LR_Scheduler": schedule} if schedule else {})})


def _check_complete(
    parameters: Mapping[str, paddle.Tensor],
    state: Mapping[str, Any],
    optimizer: paddle.optimizer.Optimizer,
) -> None:
    """A parameter has all kinds of moments or, if it never had a gradient, none."""
    found: dict[str, set[str]] = {}
    for key, value in state.items():
        name, _, accumulator = key.partition(":")
        if name not in parameters:
            raise CheckpointError(f"the optimizer state holds {key}, and the model has no {name}")
        shape = list(parameters[name].shape)
        if list(value.shape) not in (shape, [1], []):
            raise CheckpointError(
                f"the optimizer state holds {key} of the shape {list(value.shape)}, and the "
                f"parameter has the shape {shape}"
            )
        if accumulator != _MASTER:
            found.setdefault(name, set()).add(accumulator)
    kinds = set().union(*found.values())
    if isinstance(optimizer, paddle.optimizer.Adam | paddle.optimizer.AdamW):
        kinds |= _OF_ADAM
    for name, accumulators in found.items():
        if missing := sorted(kinds - accumulators):
            raise CheckpointError(
                f"the optimizer state lacks {name}:{missing[0]}: it is not whole; resume from "
                "another checkpoint"
            )
