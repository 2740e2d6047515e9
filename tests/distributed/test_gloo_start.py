"""Where gloo listens, and what two ranks say that do not reach each other; runs: tests/machines."""

from __future__ import annotations

import os
import socket
from typing import Any
from unittest import mock

import pytest
from paddle.base import core
from paddle.distributed import parallel

from paddle_recompute._paddle import distributed as paddle_distributed
from paddle_recompute._paddle import start
from paddle_recompute.errors import SyncError


def test_two_ranks_that_do_not_reach_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a firewall. Paddle alone waits 161 s and ends with gloo's traceback."""
    monkeypatch.setenv("PADDLE_MASTER", "127.0.0.1:1")
    refused = RuntimeError("[gloo/transport/tcp/pair.cc:784] connect: Connection refused")

    def begin() -> Any:
        return parallel._new_process_group_impl("gloo", None, 0, 2, "", 0)

    with (
        mock.patch.multiple(core, ProcessGroupGloo=mock.DEFAULT, TCPStore=mock.DEFAULT) as made,
        mock.patch.object(core, "create_or_get_global_tcp_store"),
        mock.patch.multiple(
            paddle_distributed.dist,
            init_parallel_env=begin,
            get_rank=lambda: 0,
            get_world_size=lambda: 2,
        ),
        mock.patch.object(start, "ATTEMPTS", 2),
        pytest.raises(SyncError, match="could not connect the ranks 0, 1 in 2 attempts") as caught,
    ):
        made["ProcessGroupGloo"].create.side_effect = refused
        paddle_distributed.init_parallel_env(
            lambda: None, lambda attempt, fault: fault, lambda: None
        )
    assert "GLOO_SOCKET_IFNAME names the interface" in str(caught.value)


def test_gloo_listens_where_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's hostname leads to 127.0.1.1."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    start.listen_where_reached("127.0.0.1")
    start.listen_where_reached("no.such.host.invalid")
    assert not os.environ["GLOO_SOCKET_IFNAME"], "there is one machine"
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))  # of no machine (RFC 5737): chooses a route
        except OSError:
            pytest.skip("this machine has no network but the loopback interface")
    start.listen_where_reached("192.0.2.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] in {name for _, name in socket.if_nameindex()} - {"lo"}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    start.listen_where_reached("192.0.2.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9", "what the user has set stays"
