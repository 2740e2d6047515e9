"""Making gloo groups, also where gloo does not connect the ranks at the first attempt.

Of three ranks or more, gloo (2.6.2, 3.3.1) fails to connect some once in 3 to 10 times ("connect:
Connection refused"), or hangs. Those that have succeeded do not know of it. Made again under
another number it works, so the ranks tell each other how it went, and all of them try again. Two
ranks that cannot reach each other wait 161 s in gloo, and end with its traceback. Can go when gloo
connects.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from paddle_recompute._paddle.native_calls import native_call
from paddle_recompute.errors import SyncError

ATTEMPTS = 6
PATIENCE = 6.0
"""Seconds for the first attempt, which takes 0.6 to 1.2 with four ranks and hangs for 30 where it
fails; each one after it has 2 more.
"""
_PATIENCE_PER_RANK = 0.05
_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_logger = logging.getLogger("paddle_recompute")


def connected(
    ranks: Sequence[int],
    make: Callable[[int], Any],
    agree: Callable[[int, str], str],
    look: Callable[[], object] = lambda: None,
) -> Any:
    """What ``make(attempt)`` returns in the first attempt that succeeds on all `ranks`.

    Args:
        ranks: All of them call this at the same time.
        make: Connects them, under a number of the attempt; in a thread, as what hangs cannot be
            interrupted: it is left to gloo's own limit.
        agree: ``agree(attempt, fault)`` tells the others the fault of this rank ("": none), and
            returns what failed on any rank.
        look: Raises an error where a rank will not come; called while this one waits.

    Raises:
        SyncError: No attempt succeeded.
    """
    failed = ""
    began = time.monotonic()
    for attempt in range(ATTEMPTS):
        made: list[Any] = []
        patience = PATIENCE + 2 * attempt + _PATIENCE_PER_RANK * len(ranks)
        fault = _fault_of(partial(make, attempt), made, look, patience)
        failed = agree(attempt, fault)
        if not failed:
            return made[0]
        _logger.warning(
            "gloo did not connect the ranks at attempt %d of %d (%s); all of them try again",
            attempt + 1,
            ATTEMPTS,
            failed,
        )
    raise SyncError(
        f"gloo could not connect the ranks {', '.join(map(str, ranks))} in {ATTEMPTS} attempts and "
        f"{time.monotonic() - began:.0f} s; in the last one, {failed}. See that their machines "
        "reach each other on all TCP ports (GLOO_SOCKET_IFNAME names the interface), and start "
        "again."
    )


def _fault_of(
    make: Callable[[], Any], made: list[Any], look: Callable[[], object], patience: float
) -> str:
    """Why there is no result of ``make()`` in `made` in time; "" if it is there."""
    faults: list[str] = []

    def run() -> None:
        try:
            with native_call():
                made.append(make())
        except BaseException as error:
            faults.append((str(error).strip() or type(error).__name__).splitlines()[-1])

    thread = threading.Thread(target=run, name="connecting", daemon=True)
    thread.start()
    deadline = time.monotonic() + patience
    while thread.is_alive():
        look()
        if time.monotonic() > deadline:
            return f"no answer within {patience:.0f} s"
        thread.join(0.05)
    return "".join(faults)


def listen_where_reached(master: str) -> None:
    """Set ``GLOO_SOCKET_IFNAME`` to the interface that leads to `master`, if gloo would listen on
    the loopback interface otherwise.

    gloo (2.6, 3.x) listens where the machine's own hostname leads. That is 127.0.1.1 on Debian,
    where no other machine arrives.

    Args:
        master: Name or address of the machine of rank 0. Nothing is changed if it is this machine's
            loopback address: then there is one machine.
    """
    if os.environ.get(_INTERFACE):
        return
    with contextlib.suppress(OSError):  # the name is not known: gloo says so
        if not socket.gethostbyname(socket.gethostname()).startswith("127."):
            return
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((master, 1))  # sends nothing: chooses the route
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex() if not own.startswith("127.") else ():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                request = struct.pack("40s", name.encode())
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]
                if socket.inet_ntoa(found) == own:
                    os.environ[_INTERFACE] = name
                    return
