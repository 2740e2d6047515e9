"""Calls without recompute, for a while: what a model would do if nothing of it were wrapped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import paddle
from paddle.distributed.fleet import utils as fleet_utils

from paddle_recompute.recompute._fleet import FleetRecomputeLayer
from paddle_recompute.recompute.function import recompute
from paddle_recompute.recompute.layer import (
    RecomputedFunction,
    RecomputeLayer,
    SelectiveLayer,
    WrappedLayer,
)

_OPTIONS = (
    "preserve_rng_state",
    "use_reentrant",
    "determinism_check",
    "offload",
    "offload_indices",
    "partition",
)


def wrapped_layers(model: paddle.nn.Layer) -> dict[str, paddle.nn.Layer]:
    """The sublayers of `model` that are recomputed as a whole, by name."""
    return {
        name: layer
        for name, layer in model.named_sublayers(include_self=True)
        if isinstance(layer, RecomputeLayer | FleetRecomputeLayer)
    }


@contextmanager
def called_plainly() -> Iterator[None]:
    """Inside, every call of a recomputed Layer or function is the plain call.

    It holds for `recompute`, for wrapped Layers, and for fleet's ``recompute`` under whatever name
    a loaded module has it.
    """
    with ExitStack() as stack:
        for wrapping in (RecomputeLayer, SelectiveLayer, FleetRecomputeLayer):
            _replace(stack, wrapping, "__call__", _bare_call(wrapping))
        _replace(stack, RecomputedFunction, "__call__", _call_function)
        for function in (recompute, *_of_fleet()):
            for module in list(sys.modules.values()):
                for name, value in list(getattr(module, "__dict__", {}).items()):
                    if value is function and module.__name__ != __name__:
                        _replace(stack, module, name, _plain)
        yield


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _call_function(self: RecomputedFunction, *args: Any, **kwargs: Any) -> Any:
    return self.function(*args, **kwargs)


def _of_fleet() -> list[Callable[..., Any]]:
    found = [fleet_utils.recompute]
    inner = sys.modules.get("paddle.distributed.fleet.recompute.recompute")
    if inner is not None:
        found.append(inner.recompute)
    package = sys.modules.get("paddle.distributed.fleet.recompute")
    one = getattr(package, "recompute", None)
    if callable(one):
        found.append(one)
    return found


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **{k: v for k, v in kwargs.items() if k not in _OPTIONS})


def _bare_call(wrapping: type[WrappedLayer]) -> Callable[..., Any]:
    def call(self: paddle.nn.Layer, *args: Any, **kwargs: Any) -> Any:
        return super(wrapping, self).__call__(*args, **kwargs)

    return call
