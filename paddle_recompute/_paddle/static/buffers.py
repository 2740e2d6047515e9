"""Buffers of a model that is built in a Program.

``Layer.register_buffer`` (2.6, 3.x) takes a dygraph Tensor alone, and in static mode every
operator of a constructor (``paddle.arange(8)``) returns a variable. So it is replaced while the
model is made; afterwards each variable is computed once, and a variable that lives from run to run
takes its place. Can go when ``register_buffer`` takes variables.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
from numpy.typing import NDArray

from paddle_recompute._paddle.static import native
from paddle_recompute._paddle.static.training import free_with, is_variable


@contextlib.contextmanager
def of_variables() -> Iterator[None]:
    """Inside, variables can be registered as buffers."""
    original = paddle.nn.Layer.register_buffer

    @functools.wraps(original)
    def register(self: paddle.nn.Layer, name: str, tensor: Any, persistable: bool = True) -> None:
        original(self, name, None if is_variable(tensor) else tensor, persistable)
        self._buffers[name] = tensor

    paddle.nn.Layer.register_buffer = register
    try:
        yield
    finally:
        paddle.nn.Layer.register_buffer = original


def keep(model: paddle.nn.Layer) -> dict[str, NDArray[Any]]:
    """Let the buffers of `model`, which was just built in the default Programs, live from run to
    run; returns their first values, by variable.
    """
    main = paddle.static.default_main_program()
    startup = paddle.static.default_startup_program()
    found = {
        name_of(f"{name}.{key}" if name else key): (layer._buffers, key)
        for name, layer in model.named_sublayers(include_self=True)
        for key, value in layer._buffers.items()
        if is_variable(value)
    }
    if not found:
        return {}
    values = _computed(main, startup, [slots[key] for slots, key in found.values()])
    for name, (slots, key) in found.items():
        slots[key] = native().persistable(name, slots[key], startup, main)
        slots[key].stop_gradient = True
    return dict(zip(found, values, strict=True))


def name_of(buffer: str) -> str:
    """The variable of the buffer with this name in the model."""
    return f"buffer_of.{buffer}"


class _Run:
    """Owns what a run leaves, so that it is freed."""


def _computed(main: Any, startup: Any, variables: list[Any]) -> list[NDArray[Any]]:
    generators = paddle.get_rng_state()
    owner, executor, scope = _Run(), paddle.static.Executor(), paddle.static.Scope()
    free_with(owner, executor, scope)
    try:
        with paddle.static.scope_guard(scope):
            executor.run(startup)
            return [np.array(array) for array in executor.run(main, fetch_list=variables)]
    finally:
        paddle.set_rng_state(generators)
