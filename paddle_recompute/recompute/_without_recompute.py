"""Calls without recompute, for a while: what a model would do if nothing of it were wrapped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paddle_recompute._paddle.fleet_recompute import fleet_recompute, rebind

num_running = 0
"""Blocks of `without_recompute`: they may nest, and threads may overlap."""
_lock = threading.Lock()


@contextmanager
def without_recompute() -> Iterator[None]:
    """Inside, every call of a recomputed Layer or function is the plain call, in all threads.

    It holds for `recompute`, for wrapped Layers, and for fleet's ``recompute`` wherever a module
    has it as a global. Fleet's function in a closure or a class attribute stays what it is.
    """
    global num_running
    with _lock:
        num_running += 1
        if num_running == 1:
            rebind(fleet_recompute, _call)
    try:
        yield
    finally:
        with _lock:
            num_running -= 1
            if num_running == 0:
                rebind(_call, fleet_recompute)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of fleet's ``recompute``."""
    for option in ("preserve_rng_state", "use_reentrant", "offload_indices"):
        kwargs.pop(option, None)
    return function(*args, **kwargs)
