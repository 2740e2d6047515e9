"""Report each Layer at the moment a forward calls it.

The search that starts at the function (`captured_state`) cannot follow an import inside a function,
a queue, a weak reference or a descriptor. A Layer behind one of these is reported here when it is
called, before its forward reads or changes its state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container

from paddle_recompute._paddle.layers import LayerCallback, watch_layers


def begin_reporting(
    known: Container[int], called: LayerCallback, built: LayerCallback = lambda layer: None
) -> None:
    """In this thread and until `end_reporting`, run ``called(layer)`` before each call of a Layer
    whose id is not in `known`, and ``built(layer)`` after each construction of a Layer.
    """
    watches = watch_layers()
    watches.called.append((known, called))
    watches.built.append(built)


def end_reporting() -> None:
    """Undo the last `begin_reporting` of this thread."""
    watches = watch_layers()
    watches.called.pop()
    watches.built.pop()


def on_every_call(called: LayerCallback) -> Callable[[], None]:
    """From now on, in all threads, call ``called(layer)`` before each call of a Layer.

    Returns:
        A function that ends it; it may be called more than once.
    """
    everywhere = watch_layers().everywhere
    everywhere.append(called)

    def stop() -> None:
        with contextlib.suppress(ValueError):
            everywhere.remove(called)

    return stop
