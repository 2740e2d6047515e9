"""The connection of a rank to its peers, and waits that end when a peer has died or failed.

A `ControlClient` connects this process to the control server in rank 0 (`control_server`). A thread
sends signs of life and records what the server reports (`peer_state`). Code that waits for other
ranks waits on a `threading.Event`, never in C++, and checks that record:
`ControlClient.wait_until`. So a rank that waits for a dead, stopped or failed peer ends with a
`PeerError` that names the peer, instead of hanging or of being aborted by a collective.

A rank that computes sends signs of life only. A rank that has waited for longer than a tick sends
the label of its wait. So the other ranks can name the rank that they wait for, and ranks that wait
at different calls are detected.

The first failure ends the run on all ranks: from then on every wait of every rank raises an error
with that cause. How a rank reports its failure, and how its process ends, is in `shutdown`.

Needs no Paddle: `rendezvous.connect_early` connects before Paddle is imported, `connection.peers`
after the ranks have joined Paddle's process group.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from paddle_recompute.distributed.control_link import ControlLink
from paddle_recompute.distributed.control_server import TICK, ControlServer
from paddle_recompute.distributed.control_wire import Message, RunKey
from paddle_recompute.distributed.peer_state import (
    PeerState,
    RankValue,
    Scope,
    ranks_at_different_calls,
    where,
)
from paddle_recompute.distributed.shutdown import Failure, Shutdown
from paddle_recompute.errors import PeerError, SyncError

_POLL = 0.1
_MAX_SHOWN_VALUES = 8  # so that the message of an error stays short
_EXPLANATION = 5.0  # seconds to find out which rank made a collective fail
Error = TypeVar("Error", bound=BaseException)


class _Answer:
    """The answer of the server to an exchange, sent when all ranks have arrived."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.by_value: list[Message] = []
        """The different values, each with the ranks that have it."""


class ControlClient:
    """This rank's connection to the others.

    Args:
        rank: Of this process.
        size: How many ranks there are.
        host: Of rank 0.
        port: Where its control server listens.
        key: Of the run.
        connect_timeout: Seconds in which the server must be reached.
        server: The control server; None on all ranks but 0.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        port: int,
        key: RunKey,
        connect_timeout: float,
        server: ControlServer | None = None,
    ) -> None:
        self.rank = rank
        self.all_ranks = tuple(range(size))
        self.state = PeerState(rank, self.all_ranks)
        """What is known of the other ranks, the phase of this one, and its limits for waits."""
        self._link = ControlLink(self.state, host, port, key, connect_timeout)
        self._own_failure = Failure(self.state, self._link)
        self.shutdown = Shutdown(self.state, self._link, self._own_failure, server)
        self.raise_in_caller: Callable[[BaseException], None] = lambda error: None
        """Called with each error that ends a wait. If an autograd hook waits, it makes
        ``backward()`` raise this very error.
        """
        self.check_collectives: Callable[[], None] = lambda: None
        """Called by the thread in each tick."""
        self._answers: dict[str, _Answer] = {}
        self._waits = itertools.count(1)
        self._link.start(self._hear, self._tick)

    def exchange(
        self, label: str, scope: Scope, value: Any = None, *, lane: str = "main", limit: int = 0
    ) -> list[RankValue]:
        """Wait for all ranks of `scope`, and return their different values.

        Costs one message to rank 0 and one back. Do not call it in each step: rank 0 serves all
        ranks.

        Args:
            label: Name of the exchange; must be the same on all ranks.
            scope: The ranks.
            value: The value of this rank, as JSON can hold it.
            lane: Name of a sequence of exchanges, which all ranks make in the same order. A
                background thread has a lane of its own. The main thread uses one lane for all
                exchanges of the same ranks, so that ranks at different calls are detected.
            limit: How many different values are returned at most; the same on all ranks. 0: all.

        Returns:
            The different values in the order of the first rank of each; one if all are the same.

        Raises:
            SyncError: The ranks are at different calls: their labels differ.
            PeerError: A rank has died, failed, fallen silent, or not come in time.
        """
        self.check(scope, label)
        channel = f"{scope.ranks_key}/{lane}"
        answer = self._answers[channel] = _Answer()
        fields = {"channel": channel, "size": len(scope.ranks), "label": label, "most": limit}
        self._link.send({"kind": "arrive", **fields, "value": value})
        self.wait_until(answer.arrived.wait, label, scope)
        by_value = answer.by_value
        if len({reply["label"] for reply in by_value}) > 1:
            raise self.fail(ranks_at_different_calls(where(by_value)))
        return [
            RankValue(tuple(reply["ranks"] or scope.ranks), reply["value"]) for reply in by_value
        ]

    def compare(self, label: str, scope: Scope, content: Any) -> list[RankValue] | None:
        """Which ranks have which content, of at most 8 different ones; None: all have the same.

        Digests are exchanged first. Only if they differ, one rank for each digest sends its
        content. Arguments and errors are those of `exchange`.
        """
        digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        digests = self.exchange(label, scope, digest, limit=_MAX_SHOWN_VALUES)
        if len(digests) == 1:
            return None
        senders = [found.ranks[0] for found in digests]
        values = self.exchange(label, scope, content if self.rank in senders else None)
        content_of = {rank: value.content for value in values for rank in value.ranks}
        return [RankValue(found.ranks, content_of[found.ranks[0]]) for found in digests]

    def wait_until(
        self,
        wait_for: Callable[[float], bool],
        label: str,
        scope: Scope,
        *,
        matches_calls: bool = True,
    ) -> None:
        """Wait until ``wait_for`` returns True, or raise if it cannot any more.

        Args:
            wait_for: ``wait_for(seconds)`` waits at most so long, and returns whether the wait is
                over.
            label: Name of the wait, for messages. The part before a colon names the call.
            scope: The ranks whose death or failure ends the wait.
            matches_calls: Whether the main threads of the other ranks must make this call too. Then
                the ranks report the calls that they wait in. If all wait, and in different calls,
                none can continue; that is a `SyncError`.

        Raises:
            PeerError: One of them has died, failed, fallen silent, or not come in time.
            SyncError: The ranks wait for each other in different calls.
        """
        waited = 0.0
        began = time.monotonic()
        matches_calls &= threading.current_thread() is threading.main_thread()
        serial = 0
        try:
            while not wait_for(_POLL):
                waited = time.monotonic() - began
                if matches_calls and not serial and waited > TICK:
                    serial = next(self._waits)
                    fields = {"label": label, "call": label.partition(":")[0], "serial": serial}
                    fields |= {"among": scope.ranks_key, "size": len(scope.ranks)}
                    self._link.send({"kind": "waits", **fields})
                error = self.error_of_wait(scope, label, waited, serial)
                if error is not None and not wait_for(0.0):
                    self.raise_in_caller(self.fail(error))
                    raise error
        finally:
            if serial:
                self._link.send({"kind": "wait ended"})

    def check(self, scope: Scope, label: str, *, waited: float = 0.0) -> None:
        """Raise if a wait for `scope` cannot complete any more. Later checks raise the same error.

        Args:
            scope: The ranks that are waited for.
            label: Name of the wait, for messages.
            waited: Seconds so far.

        Raises:
            PeerError: A rank has died, failed, fallen silent, or not come in time.
        """
        error = self.error_of_wait(scope, label, waited)
        if error is not None:
            raise self.fail(error)

    def error_of_wait(
        self, scope: Scope, label: str, waited: float, serial: int | None = None
    ) -> SyncError | None:
        """Why a wait cannot complete, as an error; None if it can. Arguments as of `check`."""
        reason = self.state.failure(scope, waited)
        if reason is not None:
            return PeerError(self.state.failure_message(reason, label))
        calls = self.state.different_calls(serial) if serial else None
        return ranks_at_different_calls(calls) if calls is not None else None

    def explain(self, error: BaseException, label: str, scope: Scope) -> PeerError:
        """Returns the `PeerError` that says why a collective of `scope` failed with `error`.

        The collective may fail before the failure of a rank is reported, so this waits for a
        report.
        """
        silence = min(_EXPLANATION, scope.limits.peer_timeout)
        deadline = time.monotonic() + silence + 2 * TICK
        while time.monotonic() < deadline:
            reason = self.state.failure(scope, waited=0.0, silence=silence)
            if reason is not None:
                return self.fail(PeerError(self.state.failure_message(reason, label)))
            time.sleep(_POLL)
        return self.fail(
            PeerError(
                f"{label} failed on rank {self.rank} {self.state.phase}, although all ranks show "
                f"signs of life: {error}"
            )
        )

    def fail(self, error: Error) -> Error:
        """End the run on all ranks, with `error` as the cause if it is the first; returns it."""
        return self._own_failure.fail(error)

    def cause(self) -> str | None:
        """The failure that ended the run, with its rank and host; None: the run has not failed."""
        return self.state.cause()

    def _tick(self, is_connected: bool) -> None:
        if is_connected:
            self.check_collectives()
        self.shutdown.end_if_stuck()

    def _hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "met":
            answer = self._answers[message["channel"]]
            answer.by_value = message["groups"]
            answer.arrived.set()
        elif kind in ("heard", "over"):
            self.shutdown.hear(kind)
        else:
            self.state.take(message)
