"""The server and what its clients conclude, over real sockets but without Paddle's ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paddle_recompute.distributed.control_server import ControlServer
from tests.distributed.simulated import KEY, SimulatedRank


@pytest.fixture
def server() -> ControlServer:
    return ControlServer("127.0.0.1", KEY, 8)


@pytest.fixture
def clients(server: ControlServer) -> Iterator[list[SimulatedRank]]:
    made = [SimulatedRank(server, rank) for rank in range(3)]
    assert all(client.is_in for client in made)
    yield made
    for client in made:
        client.end()


def test_no_more_different_things_are_listed_than_wanted(clients: list[SimulatedRank]) -> None:
    for client, value in zip(clients, "abc", strict=True):
        client.say(kind="arrive", channel="c", size=3, label="x", value=value, most=2)
    for client in clients:
        assert [group["value"] for group in client.hear()["groups"]] == ["a", "b"]


def test_the_first_failure_is_told_and_no_other(clients: list[SimulatedRank]) -> None:
    clients[1].say(kind="failed", phase="in step 3", message="why")
    told = {"kind": "failed", "rank": 1, "phase": "in step 3", "message": "why", "host": ""}
    assert [client.hear() for client in clients] == [told] * 3
    clients[2].say(kind="failed", phase="in step 3", message="because of rank 1")
    clients[1].end()
    assert clients[0].hear(within=0.3) == {}


def waits(at: str, *, serial: int = 7) -> dict[str, Any]:
    told = {"among": "0-1", "size": 2, "serial": serial, "label": f"{at}: now"}
    return {"kind": "waits", "call": at, **told}


def test_ranks_that_go_on_or_wait_at_one_place_are_not_apart(
    clients: list[SimulatedRank],
) -> None:
    clients[0].say(**waits("step 2"))
    clients[1].say(**waits("step 2"))
    told = clients[0].hear()
    assert told["ranks"] == [0, 1] and "different_calls" not in told
    clients[1].say(kind="wait ended")
    assert clients[0].hear() == {"kind": "waiting", "among": "0-1", "ranks": [0]}


def test_an_end_is_announced_also_to_those_who_come_later(
    server: ControlServer, clients: list[SimulatedRank]
) -> None:
    clients[1].say(kind="left", phase="after step 9")
    assert clients[0].hear() == {"kind": "left", "phases": {"1": "after step 9"}}
    clients[2].end()
    assert clients[0].hear() == {"kind": "gone", "rank": 2, "phase": "", "host": ""}
    late = SimulatedRank(server, 7)
    assert [late.hear()["kind"], late.hear()["kind"]] == ["gone", "left"]


def test_last_words_are_passed_on_before_they_are_acknowledged(
    clients: list[SimulatedRank],
) -> None:
    clients[1].say(kind="failed", phase="in step 4", message="KeyError")
    clients[1].say(kind="left", phase="in step 4")
    assert clients[0].hear()["message"] == "KeyError"
    assert [clients[1].hear()["kind"], clients[1].hear()["kind"]] == ["failed", "heard"]
