"""The rule of a parameter that is offloaded: its values come and go as a whole.

``numpy()`` reads the values and ``set_value()`` writes them. An operator that is given the
parameter raises by itself: it has no memory. Refused here is what would go wrong in silence: its
gradient, views, copies, writing in place. While its shard computes, its memory is there, and an
operator takes it. Inside of `resident` the parameter is an ordinary one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute._paddle import guarded
from paddle_recompute.errors import OffloadError
from paddle_recompute.offload._offloaded_tensor import OffloadedTensor, offloaded_tensor_of

_RESIDENT = (
    "Inside `with resident(model):` (of paddle_recompute.offload) it is on the device, with its "
    "gradient"
)
_VIEWS_AND_COPIES = ("detach", "cpu", "cuda", "pin_memory", "__dlpack__", "data_ptr")
"""Empty or arbitrary without memory (2.6, 3.x)."""


@functools.cache
def refuse_methods() -> None:
    """Enforce the rule from now on."""
    gradient = property(_refuse_gradient, _set_gradient)
    refused = (*guarded.in_place_methods(), *_VIEWS_AND_COPIES)
    guarded.replace_methods(
        {
            **{name: _refused(name) for name in refused},
            "grad": gradient,
            "grad_": gradient,
            "_grad_ivar": _refuse_gradient,
            "gradient": _refuse_gradient,
            "clear_gradient": _clear,
            "clear_grad": _clear,
            "set_value": lambda parameter, value: _offloaded(parameter).set_value(value),
            "__array__": _array,
            "__deepcopy__": lambda parameter, memo: _offloaded(parameter).__reduce_ex__(2),
            "__reduce_ex__": lambda parameter, protocol: _offloaded(parameter).__reduce_ex__(
                protocol
            ),
        }
    )


def _offloaded(parameter: paddle.Tensor) -> OffloadedTensor:
    offloaded = offloaded_tensor_of(parameter)
    assert offloaded is not None
    return offloaded


def _array(parameter: paddle.Tensor, *args: Any, **kwargs: Any) -> NDArray[Any]:
    return np.asarray(_offloaded(parameter).numpy(), *args, **kwargs)


def _refused(name: str) -> Callable[..., NoReturn]:
    def refuse(parameter: paddle.Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise OffloadError(
            f"{name} of {parameter.name}, which is offloaded: it is on the device while its shard "
            "computes. numpy() reads it, set_value() writes to it, and state_dict() has copies in "
            f"host memory. {_RESIDENT}, for a penalty on it too"
        )

    return refuse


def _refuse_gradient(parameter: paddle.Tensor) -> NoReturn:
    raise OffloadError(
        f"the gradient of {parameter.name} is with its shard, which is offloaded, and cannot be "
        f"read or set here. {_RESIDENT}. With offload='ranks' use offload='host' for that"
    )


def _set_gradient(parameter: paddle.Tensor, gradient: Any) -> None:
    if gradient is not None:
        _refuse_gradient(parameter)
    _clear(parameter, set_to_zero=False)


def _clear(parameter: paddle.Tensor, set_to_zero: bool = True) -> None:
    offloaded = _offloaded(parameter)
    gradients = offloaded.gradients()
    if gradients is not None:
        gradients.clear([offloaded.index], set_to_zero=set_to_zero)
