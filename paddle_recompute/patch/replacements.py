"""Functions with the arguments of fleet's ``recompute`` and ``recompute_hybrid``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle_recompute._nested import tensors_in
from paddle_recompute._paddle.fleet_recompute import custom_state_functions
from paddle_recompute.errors import ConfigError
from paddle_recompute.recompute import (
    RecomputeOptions,
    SomeOnHost,
    is_recomputing,
    run_recomputed,
)


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`paddle_recompute.recompute` in place of ``paddle.distributed.fleet.utils.recompute``.

    Takes the options of fleet and no more: every other keyword argument is one of `function`.

    Args:
        function: A Layer or any callable.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments, and ``preserve_rng_state``, ``use_reentrant`` (no effect)
            and ``offload_indices``.
    """
    kwargs.pop("use_reentrant", None)
    options = RecomputeOptions(kwargs.pop("preserve_rng_state", True))
    indices = kwargs.pop("offload_indices", ())
    storage = SomeOnHost(t for i in indices for t in tensors_in(args[i])) if indices else None
    return run_recomputed(_with_custom_state(function), args, kwargs, options, storage=storage)


def recompute_hybrid(
    ctx: dict[str, Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`paddle_recompute.recompute` in place of fleet's ``recompute_hybrid`` (pipelines).

    Args:
        ctx: ``offload``: the arguments wait in host memory. ``mp_group`` is not needed.
        function: A Layer or any callable.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Raises:
        ConfigError: ``ctx["partition"]`` is true.
    """
    if ctx.get("partition", False):
        raise ConfigError(
            "recompute_hybrid: partition=True splits the inputs over the ranks of mp_group, which "
            "paddle_recompute does not do. Set recompute_partition to False, or call unpatch_fleet"
        )
    options = RecomputeOptions(offload="host" if ctx.get("offload", False) else None)
    return run_recomputed(_with_custom_state(function), args, kwargs, options)


def _with_custom_state(function: Callable[..., Any]) -> Callable[..., Any]:
    functions = custom_state_functions()
    return function if functions is None else _Stateful(function, *functions)


class _Stateful:
    """A function whose second call finds the state that a user told fleet to preserve."""

    def __init__(
        self, function: Callable[..., Any], get: Callable[..., Any], put: Callable[..., Any]
    ) -> None:
        self._function, self._get, self._put = function, get, put
        self._state = get()
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_recomputing():
            return self._function(*args, **kwargs)
        now = self._get()
        self._put(self._state)
        try:
            return self._function(*args, **kwargs)
        finally:
            self._put(now)
