"""Report each Layer at the moment a forward calls it.

The search that starts at the function (`captured_state`) cannot follow everything: an import inside
a function, a queue, a weak reference, a descriptor. A Layer that is called nevertheless is reported
here, before its forward reads or changes its state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container

from paddle_recompute._paddle.layers import LayerCallback, watch_layers


def begin_reporting(
    known: Container[int], called: LayerCallback, built: LayerCallback = lambda layer: None
) -> None:
    """From now on, in this thread, ``called(layer)`` runs before each call of a Layer whose id is
    not `known`, and ``built(layer)`` after each Layer was constructed; until `end_reporting`.
    """
    watches = watch_layers()
    watches.called.append((known, called))
    watches.built.append(built)


def end_reporting() -> None:
    """End what the last `begin_reporting` of this thread began."""
    watches = watch_layers()
    watches.called.pop()
    watches.built.pop()


def on_every_call(called: LayerCallback) -> Callable[[], None]:
    """From now on, in all threads, call ``called(layer)`` before each call of a Layer.

    Returns:
        Ends it; may be called more than once.
    """
    everywhere = watch_layers().everywhere
    everywhere.append(called)

    def stop() -> None:
        with contextlib.suppress(ValueError):
            everywhere.remove(called)

    return stop
