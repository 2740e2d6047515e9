"""Report each Layer at the moment a forward calls it.

The search that starts at the function (`reach`) cannot follow everything: an import inside a
function, a queue, a weak reference, a descriptor. A Layer that is called nevertheless is reported
here, before its forward reads or changes its state.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import paddle

from paddle_recompute._paddle.layers import watch_layers

Callback = Callable[[paddle.nn.Layer], None]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.called: list[tuple[dict[int, Any], Callback]] = []
        self.built: list[Callback] = []


_thread = _Thread()


def begin_reporting(known: dict[int, Any], called: Callback, built: Callback | None = None) -> None:
    """From now on, in this thread, ``called(layer)`` runs before each call of a Layer whose id is
    not `known`, and ``built(layer)`` after each Layer was constructed; until `end_reporting`.
    """
    watch_layers(_called, _built)
    _thread.called.append((known, called))
    _thread.built.append(built or _ignore)


def end_reporting() -> None:
    """End what the last `begin_reporting` of this thread began."""
    _thread.called.pop()
    _thread.built.pop()


_everywhere: list[Callback] = []


def on_every_call(called: Callback) -> Callable[[], None]:
    """From now on, in all threads, call ``called(layer)`` before each call of a Layer.

    Returns:
        Ends it; may be called more than once.
    """
    watch_layers(_called, _built)
    _everywhere.append(called)

    def stop() -> None:
        with contextlib.suppress(ValueError):
            _everywhere.remove(called)

    return stop


def _called(layer: paddle.nn.Layer) -> None:
    for known, report in _thread.called:
        if id(layer) not in known:
            report(layer)
    if _everywhere:
        for callback in list(_everywhere):
            callback(layer)


def _built(layer: paddle.nn.Layer) -> None:
    for callback in _thread.built:
        callback(layer)


def _ignore(layer: paddle.nn.Layer) -> None:
    """For callers that do not need to know which Layers are constructed."""
