"""The connection of this process to the other ranks, and Paddle's process group on top of it.

`peers` is the connection. Where `rendezvous.connect_early` has made it, the ranks meet there
before Paddle's process group is made (`join_process_group`); else it is made when it is first
needed, with the store of the process group as the place where rank 0 says where it listens.
"""

from __future__ import annotations

import functools
import json
import secrets
import time
from typing import Any

import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.backward import raise_in_caller, watch_backward
from paddle_recompute._paddle.distributed import init_parallel_env, store_await, store_publish
from paddle_recompute._paddle.endpoint import master_endpoint
from paddle_recompute._paddle.native_calls import end_native_calls, native_call
from paddle_recompute.distributed.control_client import ControlClient
from paddle_recompute.distributed.control_server import ControlServer
from paddle_recompute.distributed.peer_state import Limits, Scope
from paddle_recompute.distributed.rendezvous import connect_early, connected_early, key_of
from paddle_recompute.errors import PeerError

_START = "the start of the process group"
_ADDRESS = "paddle_recompute/control_server"
_LIKE_PADDLE = 900.0
"""Seconds for all ranks to come to where a program joins them, as Paddle's own store waits."""


class Watched:
    """A collective of a device that has begun; see `waiting_collectives`."""

    def __init__(self, what: str, scope: Scope) -> None:
        self.what = what
        self.scope = scope
        self.began = time.monotonic()
        self.enqueued: Any = None
        """An event behind the collective; None while the host is still putting it on the stream,
        which can take long: at the first one the ranks connect.
        """

    def is_over(self) -> bool:
        """Whether it has ended."""
        if self.enqueued is None:
            return False
        with native_call():
            return bool(self.enqueued.query())


all_watched: set[Watched] = set()
"""Collectives of a device that have begun; the thread of the control link looks at them."""


def connect_ranks() -> ControlClient:
    """Connect the ranks, before Paddle's process group exists or after; as `peers`."""
    if not dist.is_initialized():
        connect_early(_LIKE_PADDLE)
    return peers()


def join_process_group() -> None:
    """``dist.init_parallel_env``, which an error of any rank ends on all of them.

    Raises:
        PeerError: A rank has failed or died, or did not come in time.
        SyncError: gloo does not connect the ranks.
    """
    if dist.is_initialized():
        return
    if dist.get_world_size() == 1:  # no other rank to wait for
        dist.init_parallel_env()
        return
    client = connect_ranks()
    client.shutdown.explain_sigterm()
    scope = Scope(client.all_ranks, client.state.limits)

    def agree(attempt: int, fault: str) -> str:
        said = client.exchange(f"{_START}, attempt {attempt + 1}", scope, fault)
        return "; ".join(
            f"rank {', '.join(map(str, value.ranks or scope.ranks))}: {value.content or 'made'}"
            for value in said
            if any(other.content for other in said)
        )

    client.exchange(_START, scope)
    init_parallel_env(
        lambda: client.exchange(f"{_START}: the store", scope),
        agree,
        lambda: client.check(scope, _START),
    )
    client.shutdown.explain_sigterm()


@functools.cache
def peers() -> ControlClient:
    """This process's connection to the other ranks; connects at the first call, for which rank 0
    must call it too.
    """
    client = connected_early() or _connect_by_store()
    client.raise_in_caller, client.shutdown.end_native_calls = raise_in_caller, end_native_calls
    client.check_collectives = functools.partial(_check_watched, client)
    client.shutdown.end_before_paddle()
    watch_backward()
    return client


def _connect_by_store() -> ControlClient:
    rank, size, host = dist.get_rank(), dist.get_world_size(), master_endpoint().rpartition(":")[0]
    server, limits = None, Limits()
    if rank == 0:
        token = secrets.token_hex(32)
        server = ControlServer(host, key_of(token), size)
        store_publish(_ADDRESS, json.dumps([server.port, token]))
    patience = limits.stall_timeout
    try:
        told = store_await(_ADDRESS, patience)
    except RuntimeError as error:  # the store's
        raise PeerError(f"rank 0 cannot be reached, it may have died: {error}") from error
    if told is None:
        raise PeerError(
            f"rank 0 did not come within {patience:.0f} s to where rank {rank} waits for it; every "
            "rank of a run must call GradientSync, barrier or the like, rank 0 too"
        )
    port, token = json.loads(told)
    return ControlClient(rank, size, host, port, key_of(token), limits.peer_timeout, server)


def _check_watched(client: ControlClient) -> None:
    for watched in [*all_watched]:
        if watched.is_over():
            all_watched.discard(watched)
            continue
        error = client.error_of_wait(watched.scope, watched.what, time.monotonic() - watched.began)
        if error is not None:
            client.fail(error)


def is_distributed(group: Group | None = None) -> bool:
    """Whether there are other ranks: a group is set up and has more than one rank."""
    return bool(dist.is_initialized()) and int(dist.get_world_size(group)) > 1


def scope_of(group: Group | None) -> Scope:
    """The ranks of `group` (None: all), as those who wait for each other."""
    return Scope(_ranks_of(group), peers().state.limits)


@functools.cache
def _ranks_of(group: Group | None) -> tuple[int, ...]:
    return tuple(range(dist.get_world_size()) if group is None else group.ranks)


@functools.cache
def is_gloo(group: Group | None = None) -> bool:
    """Whether the collectives of `group` are gloo's, on the host."""
    return str(dist.get_backend(group)).lower() == "gloo"
