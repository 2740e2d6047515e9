"""The rule of a parameter that is away: what is done with it is done with a copy, or refused.

There is one place where it is enforced, `_call`: every method of such a parameter and every
operator that is given it comes here (`_paddle.guarded`), wherever its memory is at the moment.

- What reads it gets a copy, which goes away with the result.
- What writes to it writes to a copy, which then is the parameter's value.
- What needs its gradient, and a view of it, are refused: the one would come from memory that is
  gone, the other would not follow the parameter.

``grad`` and ``clear_gradient`` are those of `ShardGradients`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import paddle

from paddle_recompute import _nested
from paddle_recompute._paddle import guarded
from paddle_recompute._paddle.writes import address_of
from paddle_recompute.errors import OffloadError
from paddle_recompute.offload._away import Away, away_of
from paddle_recompute.offload._gradients import ShardGradients
from paddle_recompute.replay import is_written_since, stamp_in_place

_RESIDENT = "inside `with resident(model):` (of paddle_recompute.offload) it is on the device"
_HAVE_NO_GRADIENT = guarded.names(
    "numpy item tolist place layout strides data copy_ set_value assign_value_ full_ equal "
    "not_equal less_than less_equal greater_than greater_equal equal_all allclose isnan isinf "
    "isfinite numel shape is_empty zeros_like ones_like full_like _copy_to __array__ __bool__ "
    "__float__ __int__ __index__ __repr__ __str__ __format__ __eq__ __ne__ __lt__ __le__ __gt__ "
    "__ge__"
)
_BYPASS = guarded.names(
    "get_tensor data_ptr backward detach_ share_memory_ __dlpack__ __deepcopy__ __reduce_ex__ "
    "get_map_tensor get_selected_rows __cuda_array_interface__ share_memory"
)


@functools.cache
def enforce() -> None:
    """Enforce the rule from now on."""
    guarded.guard_methods_and_operators(_call, (property(_gradient, _set_gradient), _clear))


def _call(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    lent: dict[int, tuple[paddle.Tensor, Away, paddle.Tensor]] = {}

    def lend(value: Any) -> Any:
        if not guarded.is_guarded(value):
            return value
        if id(value) not in lent:
            _refuse(name, value)
            away = away_of(value)
            assert away is not None
            lent[id(value)] = value, away, away.copy()
        return lent[id(value)][2]

    if name == "numpy" and guarded.is_guarded(args[0]):
        away = away_of(args[0])
        assert away is not None
        return away.numpy()
    args, kwargs = _nested.map_leaves(lend, args), _nested.map_leaves(lend, kwargs)
    stamps = [(away, copy, stamp_in_place(copy)) for _, away, copy in lent.values()]
    result = function(*args, **kwargs)
    # Not every operator that writes is counted; its name ends in "_", and its first argument is
    # what it writes to.
    is_write = name.endswith("_") and not name.endswith("__")
    written = {id(t) for t in _nested.tensors_in(args[:1])} if is_write else set()
    for away, copy, stamp in stamps:
        if id(copy) in written or is_written_since(copy, stamp):
            _refuse_another_form(name, away.tensor, copy)
            away.replace(copy)
            written.add(id(copy))

    def give_back(leaf: Any) -> Any:
        for parameter, _, copy in lent.values():
            if leaf is copy:
                return parameter
            if isinstance(leaf, paddle.Tensor) and _shares(leaf, copy):
                if id(copy) in written:  # what an operator that writes returns
                    return parameter
                raise OffloadError(
                    f"{name} of {parameter.name} would be a view, which does not follow a "
                    "parameter that is offloaded. Take clone() of it under paddle.no_grad(), or "
                    f"numpy(); {_RESIDENT}"
                )
        return leaf

    return _nested.map_leaves(give_back, result)


def _refuse(name: str, parameter: paddle.Tensor) -> None:
    if name in _BYPASS:
        raise OffloadError(
            f"{name} of {parameter.name}: it is offloaded, so it has no memory of its own and "
            f"cannot be copied or pickled. state_dict() has copies in host memory; {_RESIDENT}"
        )
    if paddle.is_grad_enabled() and not parameter.stop_gradient and name not in _HAVE_NO_GRADIENT:
        raise OffloadError(
            f"{name} of {parameter.name} would need its gradient, and it is offloaded: it is on "
            f"the device while its shard computes. Under paddle.no_grad() it can be read; "
            f"{_RESIDENT}, for a penalty on it too"
        )


def _refuse_another_form(name: str, parameter: paddle.Tensor, copy: paddle.Tensor) -> None:
    if copy.shape != parameter.shape or copy.dtype != parameter.dtype:
        raise OffloadError(
            f"{name} would make {parameter.name}, which is offloaded, {list(copy.shape)} of "
            f"{copy.dtype}; its shape {list(parameter.shape)} and dtype {parameter.dtype} stay"
        )


def _shares(one: paddle.Tensor, copy: paddle.Tensor) -> bool:
    address, begin = address_of(one), address_of(copy)
    if address is None or begin is None:
        return False
    return begin <= address < begin + int(copy.size) * int(copy.element_size())


def _gradient(parameter: paddle.Tensor) -> paddle.Tensor | None:
    gradients, index = _gradients_of(parameter)
    return gradients.show(index) if gradients is not None else None


def _set_gradient(parameter: paddle.Tensor, gradient: Any) -> None:
    gradients, index = _gradients_of(parameter)
    if gradients is None or gradient is None:
        _clear(parameter, set_to_zero=False)
    elif not isinstance(gradient, paddle.Tensor) or gradient.shape != parameter.shape:
        raise OffloadError(
            f"the gradient of {parameter.name} was set to "
            f"{getattr(gradient, 'shape', type(gradient).__name__)}; it must be a tensor of shape "
            f"{list(parameter.shape)}"
        )
    else:
        gradients.replace(index, gradient)


def _clear(parameter: paddle.Tensor, set_to_zero: bool = True) -> None:
    gradients, index = _gradients_of(parameter)
    if gradients is not None:
        gradients.clear([index], set_to_zero=set_to_zero)


def _gradients_of(parameter: paddle.Tensor) -> tuple[ShardGradients | None, int]:
    away = away_of(parameter)
    assert away is not None
    return away.gradients(), away.index
