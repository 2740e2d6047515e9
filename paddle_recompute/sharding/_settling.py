"""Parameters whose new values are on their way: whoever uses one waits for it.

All uses come to `settle`: every operator, method and collective that needs the memory of such a
parameter (`_paddle.guarded`), whoever calls it; every backward, whose graph may have kept one; the
next update; and the end of the process, because the other ranks wait for what this one sends. What
asks for a name, a shape or a gradient does not wait. So a forward waits for each parameter when it
reads it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence

import paddle

from paddle_recompute._paddle import guarded
from paddle_recompute._paddle.backward import before_each_backward
from paddle_recompute.errors import SyncError

_coming: dict[int, tuple[paddle.Tensor, Callable[[], object]]] = {}
_lock = threading.RLock()  # a signal handler may read a parameter


def expect(parameters: Sequence[paddle.Tensor], arrive: Callable[[], object]) -> None:
    """From now on, who uses `parameters` calls `arrive` first, which returns when they are here."""
    _watch()
    with _lock:
        for parameter in parameters:
            _coming[id(parameter)] = parameter, arrive
            guarded.wait_for(parameter)


def settle(parameters: Iterable[paddle.Tensor] | None = None) -> None:
    """Return when the new values of `parameters` are here, and on the other ranks what this rank
    owns of them; None: of all parameters.

    Raises:
        PeerError: A rank has died, stopped or failed. They stay on their way for ever then.
        SyncError: The ranks are at different updates.
    """
    for key in [*_coming] if parameters is None else [*map(id, parameters)]:
        while coming := _coming.get(key):
            parameter, arrive = coming
            arrive()
            with _lock:  # another thread may have settled it, and the next update begun
                if _coming.get(key) is coming:
                    guarded.unguard(parameter)
                    del _coming[key]


def are_coming(parameters: Iterable[paddle.Tensor]) -> bool:
    """Whether any of `parameters` is on its way."""
    return any(id(one) in _coming for one in parameters)


@functools.cache
def _watch() -> None:
    guarded.wait_before_use(lambda parameter: settle([parameter]))
    before_each_backward(settle)
    os.register_at_fork(before=_settle_at_exit)  # a child has no lanes
    atexit.register(_settle_at_exit)  # before that of the ControlClient, which was made before


def _settle_at_exit() -> None:
    with contextlib.suppress(SyncError):  # it has ended the run, and was told
        settle()
