"""The group of all ranks, also where gloo does not connect them at the first attempt."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from paddle.base import core
from paddle.distributed import parallel

from paddle_recompute._paddle.native_calls import native_call

ATTEMPTS = 6
PATIENCE = 8.0
"""Seconds that an attempt may take when all ranks are there; gloo needs 0.6 to 1.2 of them for four
ranks, and hangs for 30 where it fails.
"""
_PATIENCE_PER_RANK = 0.05
_GATHERING = 900.0  # seconds for all ranks to come, as Paddle's own store waits
_FIRST_NUMBER = 2**19  # far from the numbers that Paddle counts up from 0
_KEY = "paddle_recompute/start"
_logger = logging.getLogger("paddle_recompute")


@contextlib.contextmanager
def gloo_group_tried_again(endpoint: Callable[[], str]) -> Iterator[None]:
    """Inside, ``dist.init_parallel_env`` makes its gloo group anew where that fails.

    Of three ranks or more, gloo (2.6.2, 3.3.1) fails to connect some once in 3 to 10 times
    ("connect: Connection refused"), or hangs. Those that have succeeded do not know of it. So the
    ranks tell each other in the launch's store how it went, and all of them try again under another
    number. ``parallel._new_process_group_impl`` (2.6, 3.x) is what ``init_parallel_env`` calls to
    make the group. Can go when gloo connects.

    Args:
        endpoint: Says where the launch's store listens, ``HOST:PORT``.
    """
    make = parallel._new_process_group_impl

    def tried_again(
        backend: str, store: Any, rank: int, world_size: int, *args: Any, **kwargs: Any
    ) -> Any:
        if backend != "gloo" or world_size < 3:
            return make(backend, store, rank, world_size, *args, **kwargs)
        host, _, port = endpoint().rpartition(":")
        return _connected(store, rank, world_size, host, int(port))

    parallel._new_process_group_impl = tried_again
    try:
        yield
    finally:
        parallel._new_process_group_impl = make


def _connected(store: Any, rank: int, size: int, host: str, port: int) -> Any:
    outcome = ""
    for attempt in range(ATTEMPTS):
        key = f"{_KEY}/{attempt}"
        _gather(store, f"{key}/here", size)
        made, outcome = _attempt(rank, size, host, port, attempt)
        store.add(f"{key}/failed", int(made is None))
        _gather(store, f"{key}/ended", size)
        failed = int(store.add(f"{key}/failed", 0))
        if not failed:
            return made
        _logger.warning(
            "gloo did not connect %d of %d ranks at attempt %d of %d (this rank: %s); all ranks "
            "try again",
            failed,
            size,
            attempt + 1,
            ATTEMPTS,
            outcome or "connected",
        )
    raise RuntimeError(
        f"gloo could not connect the {size} ranks in {ATTEMPTS} attempts; on rank {rank} the last "
        f"one: {outcome or 'connected'}. See that their machines reach each other on all TCP ports "
        "(GLOO_SOCKET_IFNAME names the interface), and start again."
    )


def _attempt(rank: int, size: int, host: str, port: int, attempt: int) -> tuple[Any, str]:
    """The group, or why there is none."""
    number = 0 if attempt == 0 else _FIRST_NUMBER + attempt
    made: list[Any] = []
    errors: list[str] = []

    def make() -> None:
        try:
            # A connection of its own: what hangs still waits on it, and two threads mix up each
            # other's answers.
            with native_call():
                own = core.TCPStore(host, port, False, 0)
                made.append(core.ProcessGroupGloo.create(own, rank, size, number))
        except (RuntimeError, ValueError, OSError) as error:
            errors.append(str(error).strip().splitlines()[-1])

    thread = threading.Thread(target=make, name="connecting", daemon=True)
    thread.start()
    patience = PATIENCE + 2 * attempt + _PATIENCE_PER_RANK * size
    thread.join(patience)
    if made:
        return made[0], ""
    return None, errors[0] if errors else f"no answer within {patience:.0f} s"


def _gather(store: Any, key: str, size: int) -> None:
    """Wait for all ranks."""
    deadline = time.monotonic() + _GATHERING
    arrived = int(store.add(key, 1))
    while arrived < size:
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"only {arrived} of {size} ranks have started within {_GATHERING:.0f} s; the logs "
                "of the others may say why"
            )
        time.sleep(0.02)
        arrived = int(store.add(key, 0))
