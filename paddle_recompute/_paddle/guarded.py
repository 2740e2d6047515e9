"""Parameters that operators and methods are kept from, because their memory is elsewhere, or do
not get at before it has been written to.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import paddle
from paddle.base import core, framework

Call = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""``call(name, function, args, kwargs)`` calls `function`, or refuses to."""


def names(text: str) -> frozenset[str]:
    """The words of `text`."""
    return frozenset(text.split())


_FACTS = names(
    "block data_format device_id dim dtype element_size grad_fn inplace_version is_complex "
    "is_contiguous is_dense is_dist is_floating_point is_integer is_leaf is_same_shape "
    "is_selected_rows is_sparse is_sparse_coo is_sparse_csr is_tensor itemsize name ndim "
    "ndimension optimize_attr persistable rank register_hook requires_grad retain_grads "
    "set_init_func shape size stop_gradient trainable type value from_tensor initialize "
    "dist_attr num_shard offset placements process_mesh"
)
"""What a tensor tells, and lets itself be told, without its memory (2.6, 3.x)."""
_OPERATORS = names("add sub mul truediv floordiv mod pow matmul and or xor lshift rshift")
_SPECIAL = names(
    "__abs__ __array__ __bool__ __complex__ __deepcopy__ __dlpack__ __eq__ __float__ __format__ "
    "__ge__ __getitem__ __gt__ __index__ __int__ __invert__ __le__ __long__ __lt__ __ne__ __neg__ "
    "__nonzero__ __pos__ __reduce_ex__ __repr__ __setitem__ __str__ _copy_to"
) | {f"__{name}__" for name in _OPERATORS}


class Guarded(framework.EagerParamBase):
    """The class of a parameter while nobody may look at its memory.

    ``parameter.__class__`` is set to it and back. It stays a parameter, with all of its attributes.
    """

    @staticmethod
    def _is_initialized() -> bool:  # or set_state_dict of 2.6 would leave it out
        return True


class Awaited(framework.EagerParamBase):
    """The class of a parameter that another thread writes to: whoever uses it waits first.

    ``parameter.__class__`` is set to it and, by what waits, back.
    """

    def __getattribute__(self, name: str) -> Any:
        if name not in _HARMLESS and not name.startswith("_paddle_recompute"):
            _wait[0](self)
        return _BASE.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HARMLESS:
            _wait[0](self)
        _BASE.__setattr__(self, name, value)


_HARMLESS = (_FACTS - {"initialize", "from_tensor"}) | names(
    "grad grad_ _grad_ivar clear_grad clear_gradient gradient __class__ __dict__ __hash__"
)
"""What neither reads nor writes the memory of a parameter; all else of it waits."""
_BASE = framework.EagerParamBase
_call: list[Call] = []
_wait: list[Callable[[paddle.Tensor], None]] = []


def wait_before_use(wait: Callable[[paddle.Tensor], None]) -> None:
    """From now on, who uses the memory of an `Awaited` parameter calls `wait`; called once.

    `wait` sets its class back. All methods and operators do, and the collectives of Paddle, of
    which not all look at an attribute of the tensor. The engine's backward does not.
    """
    _wait.append(wait)
    for name in (one for one in _SPECIAL if hasattr(_BASE, one)):
        setattr(Awaited, name, _method(name, _call_ready))
    for name in (one for one in _OPERATORS if hasattr(_BASE, f"__{one}__")):
        setattr(Awaited, f"__r{name}__", _reflected(f"__{name}__", _call_ready))
    for name in (one for one in vars(core.ProcessGroup) if not one.startswith("_")):
        setattr(core.ProcessGroup, name, _operator(name, getattr(core.ProcessGroup, name)))
    _wrap_operators()


def is_guarded(value: object) -> bool:
    """Whether `value` is a parameter that is guarded now."""
    return type(value) is Guarded


def guard(parameter: paddle.Tensor) -> None:
    """From now on, operators and methods do not get at the memory of `parameter`."""
    parameter.__class__ = Guarded


def wait_for(parameter: paddle.Tensor) -> None:
    """From now on, who uses `parameter` waits; see `wait_before_use`."""
    parameter.__class__ = Awaited


def unguard(parameter: paddle.Tensor) -> None:
    """End of `guard` and of `wait_for`."""
    parameter.__class__ = _BASE


gradient_of: Callable[[paddle.Tensor], paddle.Tensor | None] = _BASE.grad.__get__
"""What is in the ``.grad`` of a parameter itself, guarded or not."""


def guard_methods_and_operators(call: Call, gradient: tuple[property, Callable[..., Any]]) -> None:
    """From now on, all that is done with a guarded parameter goes through `call`; called once.

    Paddle (2.6, 3.x) has no callback before an operator, so two things are done, once. `Guarded`
    gets a method of its own for each method of a tensor. The C functions that take tensors are
    wrapped, wherever a module of Paddle has a reference to them: the operators (``_C_ops``,
    ``_legacy_C_ops``), that of ``paddle.grad``, and those methods of a tensor that take another
    one. Callers see no change, but 0.1 to 0.7 us for each operator. Can go when a tensor can be
    made to refuse its operators.

    Args:
        call: What is called instead.
        gradient: The property ``grad``, and ``clear_gradient``.
    """
    for name in dir(_BASE):
        if name in _SPECIAL or not (
            name in _FACTS or name.startswith("_") or name in vars(Guarded)
        ):
            member = getattr(_BASE, name)
            setattr(
                Guarded, name, _method(name, call) if callable(member) else _property(name, call)
            )
    for name in (one for one in _OPERATORS if hasattr(_BASE, f"__{one}__")):
        setattr(Guarded, f"__r{name}__", _reflected(f"__{name}__", call))
    Guarded.grad, Guarded.clear_gradient = gradient
    Guarded.grad_, Guarded.clear_grad = Guarded.grad, Guarded.clear_gradient
    Guarded._grad_ivar = lambda self: self.grad
    Guarded.gradient = lambda self: None if self.grad is None else self.grad.numpy()
    _call.append(call)
    _wrap_operators()
    # For who calls it without binding it.
    paddle.Tensor.numpy = _operator("numpy", paddle.Tensor.numpy)
    paddle.Tensor._share_underline_tensor_to = _sharing(paddle.Tensor._share_underline_tensor_to)
    core.eager.run_partial_grad = _operator("paddle.grad", core.eager.run_partial_grad)


@functools.cache
def _wrap_operators() -> None:
    for name in ("copy_", "_setitem_dygraph", "set_value"):
        setattr(paddle.Tensor, name, _operator(name, getattr(paddle.Tensor, name)))
    known = {
        id(function): _operator(name, function)
        for operators in (paddle._C_ops, paddle._legacy_C_ops)
        for name, function in vars(operators).items()
        if isinstance(function, types.BuiltinFunctionType)
    }
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("paddle") and hasattr(module, "__file__"):
            for name, value in list(vars(module).items()):
                if id(value) in known:
                    setattr(module, name, known[id(value)])


def _method(name: str, call: Call) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        return call(name, getattr(_BASE, name), args, kwargs)

    return method


def _reflected(name: str, call: Call) -> Callable[..., Any]:
    def operator(self: Any, other: Any) -> Any:
        if isinstance(other, paddle.Tensor):
            return call(name, getattr(paddle.Tensor, name), (other, self), {})
        reflected = f"__r{name[2:]}"
        return call(reflected, getattr(_BASE, reflected), (self, other), {})

    return operator


def _property(name: str, call: Call) -> property:
    return property(
        lambda self: call(name, lambda tensor: getattr(tensor, name), (self,), {}),
        lambda self, value: call(name, lambda t, v: setattr(t, name, v), (self, value), {}),
    )


_LOOKED_AT: frozenset[type] = frozenset([Guarded, Awaited, list, tuple])
_mentions_neither = _LOOKED_AT.isdisjoint


def _operator(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def operator(*args: Any, **kwargs: Any) -> Any:
        if _mentions_neither(map(type, args)) and (
            not kwargs or _mentions_neither(map(type, kwargs.values()))
        ):
            return function(*args, **kwargs)
        return _call_ready(name, function, args, kwargs)

    return operator


def _sharing(share: Callable[..., Any]) -> Callable[..., Any]:
    """``vector_to_parameters`` (2.6, 3.x) shares with one parameter after the other: all that it is
    given are looked at before the first. A wrapper of it would not serve who has imported it.
    """

    @functools.wraps(share)
    def checked(source: paddle.Tensor, target: paddle.Tensor) -> None:
        caller: Any = inspect.currentframe()
        caller = caller.f_back  # nothing names its own frame, which would hold itself
        name = caller.f_code.co_name
        is_of_list = name == "vector_to_parameters"
        given = [*caller.f_locals["parameters"]] if is_of_list else [target]
        _call_ready(name, lambda *_: share(source, target), (source, given), {})

    return checked


def _call_ready(name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `function` when all that is awaited has arrived, as what is guarded lets it."""
    is_any_guarded = False
    for arg in (*args, *kwargs.values()):
        for one in arg if isinstance(arg, (list, tuple)) else (arg,):
            if type(one) is Awaited:
                _wait[0](one)
            is_any_guarded |= type(one) is Guarded
    if is_any_guarded:
        return _call[0](name, function, args, kwargs)
    return function(*args, **kwargs)
