"""Which Layers a forward calls, told as they are called.

A search from the function (`reach`) cannot follow everything: an import inside a function, a queue,
a weak reference, a descriptor. A Layer that is called all the same is met here, in time: before its
own forward has read or changed anything of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import paddle

from paddle_recompute import _paddle

Tell = Callable[[paddle.nn.Layer], None]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.called: list[Tell] = []
        self.built: list[Tell] = []


_thread = _Thread()


@contextlib.contextmanager
def telling(called: Tell, built: Tell | None = None) -> Iterator[None]:
    """Inside, in this thread, ``called(layer)`` is called before each call of a Layer, and
    ``built(layer)`` when one has been made.
    """
    _paddle.watch_layers(_called, _built)
    _thread.called.append(called)
    _thread.built.append(built or _ignore)
    try:
        yield
    finally:
        _thread.called.pop()
        _thread.built.pop()


_everywhere: list[Tell] = []


def on_every_call(called: Tell) -> Callable[[], None]:
    """From now on, in all threads, call ``called(layer)`` before each call of a Layer.

    Returns:
        Ends it; may be called more than once.
    """
    _paddle.watch_layers(_called, _built)
    _everywhere.append(called)

    def stop() -> None:
        with contextlib.suppress(ValueError):
            _everywhere.remove(called)

    return stop


def _called(layer: paddle.nn.Layer) -> None:
    for tell in _thread.called:
        tell(layer)
    if _everywhere:
        for tell in list(_everywhere):
            tell(layer)


def _built(layer: paddle.nn.Layer) -> None:
    for tell in _thread.built:
        tell(layer)


def _ignore(layer: paddle.nn.Layer) -> None:
    """Where it does not matter which Layers are made."""
