"""Calls of Paddle's C++ from daemon threads, which must not come back while the process ends.

A thread that comes back from C++ wants the GIL. If the interpreter is being finalized by then,
Python (up to 3.13; a later one lets the thread sleep) ends the thread with ``pthread_exit``, which
unwinds its stack. Paddle's C++ (2.6, 3.x) has frames that may not be unwound, so ``std::terminate``
ends the process with SIGABRT: exit code -6 in place of its own. Such a call may also use what the
end of the process has freed already.

So daemon threads call C++ inside `native_call`, and the process ends with `end_native_calls`, which
makes them come back. The exit code is then the process's own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

_changed = threading.Condition()
_num_inside = 0
_is_ending = False


@contextlib.contextmanager
def native_call() -> Iterator[None]:
    """Inside, a daemon thread is in Paddle's C++; once the process ends, no thread enters."""
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

    A thread that is still inside after a second waits for a peer that will not come. The
    connections of gloo and of Paddle's store are closed then, which makes their calls return.

    Args:
        patience: Seconds to wait at most.

    Returns:
        Whether all are out.
    """
    global _is_ending
    with _changed:
        _is_ending = True
        if _changed.wait_for(lambda: not _num_inside, min(patience, 1.0)):
            return True
    _hang_up()
    with _changed:
        return _changed.wait_for(lambda: not _num_inside, patience)


def _hang_up() -> None:
    """Shut down every TCP connection that C++ has opened.

    Python opens its own so that no child process inherits them; gloo and the client of Paddle's
    store (2.6, 3.x) do not. Can go when a process group can be aborted.
    """
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket
            if os.get_inheritable(int(name)):
                with socket.socket(fileno=os.dup(int(name))) as line:
                    # The store of 2.6 listens on another one, and aborts if that is shut down.
                    is_connected = bool(line.getpeername())
                    if is_connected and line.family in (socket.AF_INET, socket.AF_INET6):
                        line.shutdown(socket.SHUT_RDWR)


def exit_now(code: int) -> None:
    """End the process without the rest of Python's shutdown."""
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
