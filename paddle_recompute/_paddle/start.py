"""Making gloo groups, also where gloo does not connect the ranks at the first attempt.

Of three ranks or more, gloo (2.6.2, 3.3.1) fails to connect some once in 3 to 10 times ("connect:
Connection refused"), or hangs. Those that have succeeded do not know of it. Made again under
another number it works, so the ranks tell each other how it went, and all of them try again. Can go
when gloo connects.
"""

from __future__ import annotations

import logging
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
