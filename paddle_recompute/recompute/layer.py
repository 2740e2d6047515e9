"""`RecomputeLayer`: a Layer that recomputes every call, for good, and is otherwise itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import paddle

from paddle_recompute.errors import SelectionError
from paddle_recompute.recompute._storage import STORAGES
from paddle_recompute.recompute.function import (
    DeterminismCheck,
    Offload,
    RecomputeOptions,
    run_recomputed,
)

AnyLayer = TypeVar("AnyLayer", bound=paddle.nn.Layer)


class RecomputeLayer(paddle.nn.Layer):
    """What `recompute_wrapper` adds to a Layer's class.

    A wrapped Layer stays the same object with the same attributes; only its class becomes a
    subclass of `RecomputeLayer` and of what it was. So its state_dict keys, sublayer names,
    ``isinstance`` checks, hooks, ``train()``/``eval()``, pickles and deep copies are the bare
    Layer's. Forward hooks of the Layer belong to what is recomputed and run in both forwards. A
    direct ``layer.forward(x)`` goes past the recomputation, as it goes past hooks.
    """

    _recompute_options: RecomputeOptions
    _recompute_name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The Layer's own call, recomputed in the backward."""
        options = self._recompute_options
        storage = STORAGES[options.offload]
        return run_recomputed(super().__call__, args, kwargs, options, storage)

    def unwrap(self) -> paddle.nn.Layer:
        """Make this Layer what it was before `recompute_wrapper`; returns it."""
        self.__class__ = type(self)._bare_class()
        del self.__dict__["_recompute_options"], self.__dict__["_recompute_name"]
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and deepcopy as the bare Layer does; the copy is wrapped in turn."""
        bare, wrapped = type(self)._bare_class(), type(self)
        self.__class__ = bare
        try:
            rebuild, arguments, *rest = self.__reduce_ex__(protocol)
        finally:
            self.__class__ = wrapped
        return (_rebuild, (rebuild, arguments), *rest)

    @classmethod
    def _bare_class(cls) -> type[paddle.nn.Layer]:
        _, bare = cls.__bases__
        return bare


def recompute_wrapper(
    layer: AnyLayer,
    *,
    preserve_rng_state: bool = True,
    use_reentrant: bool | None = None,
    determinism_check: DeterminismCheck = "default",
    offload: Offload | None = None,
    name: str = "",
) -> AnyLayer:
    """Wrap `layer`, so that each of its calls is a `recompute`; costs one extra forward each.

    Args:
        layer: The Layer to wrap. It is changed in place.
        preserve_rng_state: As in `recompute`.
        use_reentrant: As in `recompute`.
        determinism_check: As in `recompute`.
        offload: As in `recompute`.
        name: What errors call the layer, for example its path in the model.

    Returns:
        `layer` itself, now a `RecomputeLayer` too.

    Raises:
        SelectionError: `layer` is wrapped already.
        ConfigError: An option has a value that does not exist.
    """
    if isinstance(layer, RecomputeLayer):
        raise SelectionError(
            f"{type(layer).__name__} '{name or layer.full_name()}' is wrapped already; wrapping "
            "it again would run its forward a third time. Call its unwrap() first."
        )
    options = RecomputeOptions(preserve_rng_state, use_reentrant, determinism_check, offload)
    layer._recompute_options = options
    layer._recompute_name = name
    layer.__class__ = _wrapped_class(type(layer))
    return layer


@functools.cache
def _wrapped_class(bare: type[paddle.nn.Layer]) -> type[RecomputeLayer]:
    name = f"Recompute{bare.__name__}"
    return type(name, (RecomputeLayer, bare), {"__module__": bare.__module__})


def _rebuild(rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    layer = rebuild(*arguments)
    layer.__class__ = _wrapped_class(type(layer))
    return layer
