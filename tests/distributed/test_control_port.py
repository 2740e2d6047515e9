"""Whatever arrives at the control port without the key: it is closed, nothing is printed."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddle_recompute.distributed import control_server
from paddle_recompute.distributed import control_wire as wire
from paddle_recompute.distributed.control_server import ControlServer
from tests.distributed.simulated import KEY, OTHER_SECRET, SimulatedRank
from tests.fuzz import budget

RANKS = 8


class Port:
    """A server with one rank of ours on the line."""

    def __init__(self) -> None:
        self.server = ControlServer("127.0.0.1", KEY, RANKS)
        self.ours = SimulatedRank(self.server, 0)

    def unknown(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=10)

    def assert_alive(self) -> None:
        self.ours.arrive("still here", size=1)
        while (heard := self.ours.hear())["kind"] != "met":
            assert heard["kind"] in ("gone", "failed", "left", "ended", "waiting")


@pytest.fixture(scope="module")
def port() -> Iterator[Port]:
    opened = Port()
    yield opened
    opened.ours.end()


def ends(line: socket.socket, within: float = 10.0) -> bool:
    """Whether the server closes `line`."""
    line.settimeout(within)
    with contextlib.suppress(ConnectionError):
        try:
            while line.recv(1 << 16):
                pass
        except TimeoutError:
            return False
    return True


messages = st.dictionaries(
    st.sampled_from(
        [
            "kind",
            "channel",
            "size",
            "label",
            "value",
            "most",
            "serial",
            "phase",
            "call",
            "rank",
            "key",
            "run",
            "nonce",
        ]
    ),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats()
        | st.text(max_size=8)
        | st.sampled_from(["hello", "arrive", "waits", "wait ended", "failed", "left"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
)
spoken = st.lists(
    st.binary(max_size=200) | messages.map(wire.encode) | st.just(wire.SIGN_OF_LIFE), max_size=6
).map(b"".join)


few = settings(
    max_examples=budget.examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@few
@given(said=st.binary(max_size=3000) | spoken)
def test_no_connection_without_the_key_is_accepted(port: Port, said: bytes) -> None:
    line = port.unknown()
    with contextlib.suppress(ConnectionError):
        line.sendall(said)
        line.shutdown(socket.SHUT_WR)
    assert ends(line)
    port.assert_alive()


@pytest.mark.parametrize(
    "said",
    [
        b"\2\n",
        b"x" * (2**24 + 1),
        wire.encode({"kind": "arrive"}),
        wire.encode({"kind": "no such kind"}),
        wire.encode({"kind": ["arrive"]}),
        wire.hello(2, KEY, b""),
        b"[]\n",
        b"[" * 10**6 + b"\n",
        b"9" * 10**5 + b"\n",
    ],
    ids=["no JSON", "too long", "half", "unknown", "kind", "again", "a list", "nested", "digits"],
)
def test_what_is_no_message_closes_the_line(
    port: Port, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    one = SimulatedRank(port.server, 2)
    while not one.is_in:
        one = SimulatedRank(port.server, 2)
    with contextlib.suppress(ConnectionError):
        one.socket.sendall(said)
    assert ends(one.socket)
    port.assert_alive()
    shown = capfd.readouterr()
    assert shown.out == shown.err == ""


def test_a_slow_hello_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "HELLO_SECONDS", 1.0)
    port = Port()
    line, began = port.unknown(), time.monotonic()
    line.sendall(wire.hello(1, KEY, b"")[:-1])
    assert ends(line)
    assert time.monotonic() - began < 4
    port.ours.end()


@pytest.mark.parametrize(
    ("rank", "key"),
    [(1, OTHER_SECRET), (RANKS, KEY), (2**70, KEY), (-1, KEY), (0, KEY)],
    ids=["without the key", "no such rank", "a huge rank", "a negative rank", "a rank that is in"],
)
def test_only_a_missing_rank_with_the_key_is_accepted(port: Port, rank: int, key: bytes) -> None:
    other = SimulatedRank(port.server, rank, key=key)
    assert not other.is_in and other.hear() == {}
    port.assert_alive()


def test_a_rank_with_another_key_ends_the_run_unless_one_with_the_right_key_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_server, "_KEY_TICKS", 1)
    port = Port()
    with pytest.raises(wire.KeyRefusedError):
        wire.connected("127.0.0.1", port.server.port, 1, OTHER_SECRET, 10.0)
    right = SimulatedRank(port.server, 1)
    assert port.ours.hear(within=4.0) == {}, "rank 1 came"
    with pytest.raises(wire.KeyRefusedError):
        wire.connected("127.0.0.1", port.server.port, 2, OTHER_SECRET, 10.0)
    told = port.ours.hear()
    assert (told["kind"], told["rank"], told["host"]) == ("refused", 2, socket.gethostname())
    right.end()
    port.ours.end()


def test_a_rank_of_another_run_is_not_let_in_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_server, "_KEY_TICKS", 1)
    port = Port()
    with pytest.warns(UserWarning, match="as rank 1 of another run"):
        for _ in range(2):
            other = SimulatedRank(port.server, 1, KEY._replace(run="another run"))
            assert not other.is_in
    assert port.ours.hear(within=2.5) == {}
    right = SimulatedRank(port.server, 1)
    assert right.is_in
    right.end()
    port.ours.end()


def heard_by(introduced: Callable[[socket.socket], object]) -> bytes:
    """What a rank sends to a server that has guessed the secret."""
    sides = [*socket.socketpair()]
    one = threading.Thread(target=introduced, args=(sides[0],))
    one.start()
    sides[1].settimeout(10)
    hello = wire.decode(sides[1].recv(4096))
    own = b"n" * wire.NONCE
    sides[1].sendall(own + OTHER_SECRET.proof(b"server", bytes.fromhex(hello["nonce"]), own))
    proof = sides[1].recv(wire.PROOF)
    sides[1].sendall(wire.ACCEPTED)
    one.join(10)
    return str(hello).encode() + proof


def test_the_secret_does_not_travel_and_a_server_without_it_is_refused() -> None:
    found = []

    def introduced(line: socket.socket) -> None:
        with pytest.raises(wire.KeyRefusedError):
            wire.introduce(line, 1, KEY)
        found.append("refused")

    heard = [heard_by(introduced) for _ in range(2)]
    assert found == ["refused"] * 2
    assert heard[0][-wire.PROOF :] != heard[1][-wire.PROOF :], "a proof holds once"
    assert all(form not in one for one in heard for form in (KEY.secret, KEY.secret.hex().encode()))


def test_nobody_can_connect_when_all_ranks_have() -> None:
    server = ControlServer("127.0.0.1", KEY, 2)
    ranks = [SimulatedRank(server, rank) for rank in range(2)]
    assert [rank.hear()["kind"] for rank in ranks] == ["hosts"] * 2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
    for rank in ranks:
        rank.end()


def test_ranks_that_do_not_connect_in_time_end_the_run() -> None:
    server = ControlServer("127.0.0.1", KEY, 3, patience=2.0)
    rank = SimulatedRank(server, 0)
    told = rank.hear()
    assert (told["kind"], told["rank"]) == ("absent", 1)
    rank.end()


def test_the_server_listens_where_its_host_leads_and_nowhere_else() -> None:
    loopback = ControlServer("localhost", KEY, 1)._listening
    assert loopback.getsockname()[0] in ("127.0.0.1", "::1")
    second = ControlServer("127.0.0.2", KEY, 1)
    with socket.create_connection(("127.0.0.2", second.port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", second.port), timeout=5)
