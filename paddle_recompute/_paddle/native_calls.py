"""Calls of Paddle's C++ from daemon threads, which must not come back while the process ends.

A thread that comes back from C++ wants the GIL. If the interpreter is being finalized by then,
Python (up to 3.13; a later one lets the thread sleep) ends the thread with ``pthread_exit``, which
unwinds its stack. Paddle's C++ (2.6, 3.x) has frames that may not be unwound, so ``std::terminate``
ends the process with SIGABRT: exit code -6 in place of its own. Such a call may also use what the
end of the process has freed already.

So daemon threads call C++ inside `native_call`, and the process ends with `end_native_calls`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

_changed = threading.Condition()
_num_inside = 0
_is_ending = False


@contextlib.contextmanager
def native_call() -> Iterator[None]:
    """Inside, a daemon thread is in Paddle's C++; once the process ends, nobody comes in."""
    global _num_inside
    with _changed:
        is_late = _is_ending
        _num_inside += not is_late
    while is_late:
        time.sleep(3600)
    try:
        yield
    finally:
        with _changed:
            _num_inside -= 1
            _changed.notify_all()


def end_native_calls(patience: float) -> bool:
    """Wait until all threads are out of C++; to be called last of all, from ``atexit``.

    Args:
        patience: Seconds to wait at most.

    Returns:
        Whether all are out.
    """
    global _is_ending
    with _changed:
        _is_ending = True
        return _changed.wait_for(lambda: not _num_inside, patience)
