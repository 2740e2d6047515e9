"""The server and what its clients conclude, over real sockets but without Paddle's ranks."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from paddle_recompute.distributed.control_server import TICK, ControlServer, encode
from paddle_recompute.distributed.peer_state import Limits, PeerState, Scope


class Client:
    """One rank's side of the line, message by message."""

    def __init__(self, server: ControlServer, rank: int, token: str | None = None) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        self._lines = self._socket.makefile("rb")
        self.say(kind="hello", rank=rank, token=server.token if token is None else token)

    def say(self, **message: Any) -> None:
        self._socket.sendall(encode(message))

    def exchange(self, content: Any, *, ranks: list[int], label: str = "x", scope: str = "s"):
        self.say(
            kind="exchange", channel="c", scope=scope, ranks=ranks, label=label, content=content
        )

    def hear(self) -> dict[str, Any]:
        """The next message; an empty one when the server has closed the line."""
        return json.loads(self._lines.readline() or "{}")

    def end(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.fixture
def server() -> ControlServer:
    return ControlServer("127.0.0.1")


@pytest.fixture
def clients(server: ControlServer) -> Iterator[list[Client]]:
    made = [Client(server, rank) for rank in range(3)]
    for client in made:
        client.say(kind="alive")
        assert client.hear() == {"kind": "alive", "silent": {}, "missing": {}}
    yield made
    for client in made:
        client.end()


def test_a_stranger_is_shown_the_door(server: ControlServer) -> None:
    assert Client(server, 1, token="guessed").hear() == {}


def test_everybody_gets_what_everybody_said_when_all_have(clients: list[Client]) -> None:
    for rank in (2, 0):
        clients[rank].exchange(f"of {rank}", ranks=[0, 1, 2])
    clients[0].say(kind="alive")
    assert clients[0].hear()["missing"] == {"c": [1]}
    clients[1].exchange("of 1", ranks=[0, 1, 2])
    for client in clients:
        assert client.hear() == {
            "kind": "exchanged",
            "channel": "c",
            "contents": ["of 0", "of 1", "of 2"],
        }


def test_ranks_that_say_different_things_are_told(clients: list[Client]) -> None:
    clients[0].exchange(None, ranks=[0, 1], label="step 2")
    clients[1].exchange(None, ranks=[0, 1], label="barrier")
    assert clients[0].hear()["labels"] == {"0": "step 2", "1": "barrier"}


def test_what_was_said_for_a_failed_scope_answers_nothing(clients: list[Client]) -> None:
    clients[0].exchange("old", ranks=[0, 1], scope="failed")
    clients[1].say(kind="failed", scope="failed", place="in step 3", message="why")
    assert clients[0].hear()["message"] == "why"
    clients[0].exchange("late", ranks=[0, 1], scope="failed")
    clients[1].exchange("new", ranks=[0, 1], scope="next")
    clients[0].exchange("new", ranks=[0, 1], scope="next")
    assert clients[0].hear()["contents"] == ["new", "new"]


def test_an_end_is_announced_also_to_those_who_come_later(
    server: ControlServer, clients: list[Client]
) -> None:
    clients[2].end()
    clients[1].say(kind="left", message=None, place="after step 9")
    told = sorted([clients[0].hear() for _ in range(2)], key=lambda message: message["rank"])
    assert told == [
        {"kind": "left", "message": None, "place": "after step 9", "rank": 1},
        {"kind": "gone", "rank": 2},
    ]
    late = Client(server, 7)
    assert {late.hear()["rank"], late.hear()["rank"]} == {1, 2}


def test_silence_is_counted(clients: list[Client]) -> None:
    silent: dict[str, float] = {}
    while silent.get("2", 0.0) < 2 * TICK:  # ends by the test's time limit, if at all
        clients[0].say(kind="alive")
        silent = clients[0].hear()["silent"]
    assert "0" not in silent


SCOPE = Scope((0, 1, 2), "s", Limits(peer_timeout=5, stall_timeout=60))
GONE = {"kind": "gone", "rank": 2}
LEFT = {"kind": "left", "rank": 1, "message": None, "place": "after step 9"}
FAILED = {
    "kind": "failed",
    "scope": SCOPE.key,
    "rank": 1,
    "place": "in step 4",
    "message": "KeyError: 'x'.",
    "is_peer_error": False,
}


def alive(**silent: float) -> dict[str, Any]:
    return {"kind": "alive", "silent": {r[1:]: s for r, s in silent.items()}, "missing": {}}


@pytest.mark.parametrize(
    ("messages", "waited", "trouble"),
    [
        ([], 59, None),
        ([], 61, "rank 1, 2 did not come within 61 s (stall_timeout)"),
        ([{**alive(), "missing": {f"{SCOPE.ranks}/main": [2]}}], 61, "rank 2 did not come"),
        ([alive(r2=4.0)], 1, None),
        ([alive(r2=6.0)], 1, "rank 2 has shown no sign of life for 6 s"),
        ([alive(r2=6.0), alive()], 1, None),
        ([alive(r3=6.0)], 1, None),  # of another group
        ([GONE], 0, "rank 2 has died"),
        ([{**GONE, "rank": 3}], 0, None),
        ([LEFT], 1, None),  # it may have done its part
        ([LEFT], 3, "rank 1 has ended after step 9"),
        ([FAILED], 0, "rank 1 failed in step 4: KeyError: 'x'"),
        ([{**FAILED, "scope": "other"}], 0, None),
        # Rank 1 ended because of rank 2.
        ([{**FAILED, "is_peer_error": True}, GONE], 0, "rank 2 has died"),
    ],
)
def test_when_waiting_is_in_vain(
    messages: list[dict[str, Any]], waited: float, trouble: str | None
) -> None:
    notes = PeerState(rank=0)
    for message in messages:
        notes.take(message)
    said = notes.trouble(SCOPE, waited)
    assert said == trouble if trouble is None else str(said).startswith(trouble)


def test_a_hub_that_is_lost_or_silent_is_rank_0() -> None:
    assert "rank 0" in str(PeerState(rank=1, lost="reset").trouble(SCOPE, 0))
    assert PeerState(rank=1, server_quiet=3).trouble(SCOPE, 0) is None
    silent = str(PeerState(rank=1, server_quiet=6).trouble(SCOPE, 0))
    assert silent.startswith("rank 0 has shown no sign of life")
