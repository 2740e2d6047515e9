"""Calls without recompute, for a while: what a model would do if nothing of it were wrapped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import paddle

from paddle_recompute._paddle.fleet_recompute import fleet_recompute
from paddle_recompute.recompute._fleet import FleetRecomputeLayer
from paddle_recompute.recompute.function import run_recomputed
from paddle_recompute.recompute.layer import RecomputeLayer, SelectiveLayer

_WRAPPINGS: tuple[Any, ...] = (RecomputeLayer, SelectiveLayer, FleetRecomputeLayer)
_CALL = "__call__"


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

    It holds for `recompute`, for wrapped Layers, and for fleet's ``recompute``. Models hold these
    functions under many names, so not the names but the code of the functions is exchanged.
    """
    global _num_running
    with _lock:
        _num_running += 1
        if _num_running == 1:
            _exchange()
    try:
        yield
    finally:
        with _lock:
            _num_running -= 1
            if _num_running == 0:
                _exchanged.close()


_lock = threading.RLock()
_num_running = 0
"""Blocks of `called_plainly`: they may nest, and threads may overlap."""
_exchanged = ExitStack()


def _exchange() -> None:
    for wrapping in _WRAPPINGS:
        _exchanged.callback(setattr, wrapping, _CALL, wrapping.__call__)
        delattr(wrapping, _CALL)  # what remains is the call of the bare class
    for function, plain in ((run_recomputed, _run), (fleet_recompute, _call)):
        _exchanged.callback(setattr, function, "__code__", function.__code__)
        function.__code__ = plain.__code__


def _run(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any, **__: Any
) -> Any:
    """In place of `run_recomputed`; runs with the globals of that module."""
    return function(*args, **kwargs)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of fleet's ``recompute``; runs with the globals of that module."""
    for option in ("preserve_rng_state", "use_reentrant", "offload_indices"):
        kwargs.pop(option, None)
    return function(*args, **kwargs)
