"""The rule of a parameter that is away: its values come and go as a whole, all else is refused.

There is one place where it is enforced, `_call`: every method of such a parameter and every
operator that is given it comes here (`_paddle.guarded`), wherever its memory is at the moment.
``numpy()`` reads the values and ``set_value()`` writes them. Inside of `resident` the parameter is
an ordinary one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle import guarded
from paddle_recompute.errors import OffloadError
from paddle_recompute.offload._away import away_of

_RESIDENT = (
    "Inside `with resident(model):` (of paddle_recompute.offload) it is on the device, with its "
    "gradient"
)


@functools.cache
def enforce() -> None:
    """Enforce the rule from now on."""
    gradient = property(_refuse_gradient, _set_gradient)
    guarded.guard_methods_and_operators(_call, (gradient, _clear))


def _call(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = _guarded_in((args, kwargs))
    parameter = given[0]
    away = away_of(parameter)
    assert away is not None
    if args and len(given) == 1 and parameter is args[0]:
        if name == "numpy":
            return away.numpy()
        if name == "__array__":
            return np.asarray(away.numpy(), *args[1:], **kwargs)
        if name == "set_value":
            return away.set_value(*args[1:], **kwargs)
    if name == "paddle.grad" and not _guarded_in(args[:3]):
        return function(*args, **kwargs)  # among no_grad_vars: names it, and does not look at it
    raise OffloadError(
        f"{name} of {parameter.name}, which is offloaded: it is on the device while its shard "
        "computes. numpy() reads it, set_value() writes to it, and state_dict() has copies in "
        f"host memory. {_RESIDENT}, for a penalty on it too"
    )


def _guarded_in(value: Any) -> list[paddle.Tensor]:
    return [leaf for _, leaf in _nested.named_leaves(value) if guarded.is_guarded(leaf)]


def _refuse_gradient(parameter: paddle.Tensor) -> None:
    raise OffloadError(
        f"the gradient of {parameter.name} is with its shard, which is offloaded, and cannot be "
        f"read or set here. {_RESIDENT}. With offload='ranks' use offload='host' for that"
    )


def _set_gradient(parameter: paddle.Tensor, gradient: Any) -> None:
    if gradient is not None:
        _refuse_gradient(parameter)
    _clear(parameter, set_to_zero=False)


def _clear(parameter: paddle.Tensor, set_to_zero: bool = True) -> None:
    away = away_of(parameter)
    assert away is not None
    gradients = away.gradients()
    if gradients is not None:
        gradients.clear([away.index], set_to_zero=set_to_zero)
