"""Where the ranks of a launch meet, as Paddle's launcher tells it; needs no Paddle."""

from __future__ import annotations

import os


def master_endpoint() -> str:
    """``HOST:PORT`` of the launch's TCP store, on the machine of rank 0.

    What ``init_parallel_env`` (2.6, 3.x) reads; the store itself does not tell where it is.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    endpoint = f"{address}:{port}" if address and port else os.environ.get("PADDLE_MASTER")
    if endpoint is None:
        endpoint = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0]
    return endpoint
