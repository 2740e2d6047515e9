"""Where the ranks of a run find the control server before Paddle's process group exists."""

from __future__ import annotations

import hashlib
import hmac
import os

from paddle_recompute._paddle.endpoint import master_endpoint
from paddle_recompute.distributed.control_client import ControlClient
from paddle_recompute.distributed.control_server import ControlServer
from paddle_recompute.distributed.control_wire import RunKey
from paddle_recompute.distributed.peer_state import CONTROL_KEY
from paddle_recompute.errors import PeerError

START_SECONDS = 120.0
"""For all ranks to connect, from the start of their processes on."""


def key_of(token: str) -> RunKey:
    """The key of a run that `token` tells from others."""
    run, secret = token.encode(), os.environ.get(CONTROL_KEY, "").encode()
    return RunKey(hashlib.sha256(run).hexdigest(), hmac.digest(secret, run, "sha256"))


_early: list[ControlClient] = []


def connected_early() -> ControlClient | None:
    """What `connect_early` has made; None: it was not called, or this is no rank of several."""
    return _early[0] if _early else None


def connect_early(patience: float = START_SECONDS) -> ControlClient | None:
    """Connect this process to the other ranks before Paddle's process group exists.

    Rank 0 listens where Paddle's store will listen, until all ranks have connected; so no other
    address has to be known. The ranks connect in a thread, and this returns at once. From then on
    an error of any rank ends all of them.

    Args:
        patience: Seconds for all ranks to connect.

    Returns:
        The connection, one for this process; None if this process is no rank of several.
    """
    rank, size = (os.environ.get(f"PADDLE_TRAINER{name}", "") for name in ("_ID", "S_NUM"))
    if not _early and rank.isdigit() and size.isdigit() and int(size) > 1:
        endpoint = master_endpoint()
        host, _, port = endpoint.rpartition(":")
        key = key_of(f"{endpoint}/{os.environ.get('PADDLE_TRAINER_ENDPOINTS')}")
        server = None
        if rank == "0":
            try:
                server = ControlServer(host, key, int(size), port=int(port), patience=patience)
            except OSError as error:
                raise PeerError(
                    f"rank 0 cannot listen at {endpoint} ({error.strerror}): another process may "
                    "use the port, as a run that has not ended; choose another one"
                ) from error
        _early.append(ControlClient(int(rank), int(size), host, int(port), key, patience, server))
        _early[0].shutdown.is_early = True
        _early[0].shutdown.explain_sigterm()
    return _early[0] if _early else None
