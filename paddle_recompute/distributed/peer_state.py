"""The state of the peers: which have died, failed, fallen silent or are late.

`PeerState` decides whether a wait for them can still complete.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

from paddle_recompute.distributed.control_server import TICK
from paddle_recompute.distributed.control_wire import Message
from paddle_recompute.errors import SyncError

CONTROL_KEY = "PADDLE_RECOMPUTE_CONTROL_KEY"
"""The environment variable with a secret of the run, the same on all machines."""


_LONGEST_CAUSE = 4000  # characters of an error that the other ranks show


@dataclass(frozen=True)
class RankValue:
    """A value in an exchange, and the ranks that sent it."""

    ranks: tuple[int, ...]
    content: Any


@dataclass(frozen=True)
class Limits:
    """How long to wait for other ranks.

    Attributes:
        peer_timeout: Seconds without a sign of life after which a rank counts as dead.
        stall_timeout: Seconds to wait for a rank that is alive but late.
    """

    peer_timeout: float = 30.0
    stall_timeout: float = 1800.0


@dataclass(frozen=True)
class Scope:
    """The ranks of a wait.

    Attributes:
        ranks: The global ranks, this one among them.
        limits: How long to wait.
    """

    ranks: tuple[int, ...]
    limits: Limits

    @property
    def ranks_key(self) -> str:
        """A digest that names the ranks, the same on all of them."""
        return hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]


@dataclass
class PeerState:
    """What the control server has reported of the other ranks. One thread writes, others read.

    Attributes:
        rank: This rank.
        all_ranks: All ranks of the run.
        phase: Of the run on this rank, for messages: ``in step 4``.
        limits: The limits of waits outside of a `GradientSync`: those of the newest one.
        lost: Why the connection to the control server broke; None while it holds.
        unreachable: Why no connection could be made.
        server_quiet: Ticks of this process since the last message of the control server.
    """

    rank: int
    all_ranks: tuple[int, ...] = ()
    phase: str = "before the first step"
    limits: Limits = field(default_factory=Limits)
    lost: str | None = None
    unreachable: str | None = None
    server_quiet: int = 0
    _cause: Message | None = None
    _silent: dict[int, float] = field(default_factory=dict)
    _waiting: dict[str, frozenset[int]] = field(default_factory=dict)
    _different_calls: tuple[int, str] | None = None
    _left: dict[int, str] = field(default_factory=dict)
    _hosts: dict[str, str] = field(default_factory=dict)

    def take(self, message: Message) -> None:
        """Record a report of the control server, or the failure of this rank."""
        kind = message["kind"]
        if kind == "silent":
            self._silent = {int(rank): float(s) for rank, s in message["seconds"].items()}
        elif kind == "waiting":
            self._waiting[message["among"]] = frozenset(message["ranks"])
            if "different_calls" in message:
                self._different_calls = (message["serial"], where(message["different_calls"]))
        elif kind == "left":
            for rank, phase in message["phases"].items():
                self._left.setdefault(int(rank), f"has ended {phase}".rstrip())
        elif kind == "hosts":
            self._hosts = message["hosts"]
        else:  # failed, gone, refused or absent
            self._cause = self._cause or message

    def are_all_connected(self) -> bool:
        """Whether all ranks have connected."""
        return bool(self._hosts)

    def named(self, rank: int) -> str:
        """``rank 1 on HOST``, if the host is known."""
        host = self._hosts.get(str(rank))
        return f"rank {rank} on {host}" if host else f"rank {rank}"

    def cause(self) -> str | None:
        """The failure that ended the run, of the first rank that failed or died; None: none."""
        if self._cause is not None:
            return _described(self._cause)
        if self.unreachable is not None:
            return f"rank 0 cannot be reached: {self.unreachable}"
        if self.lost is not None and 0 not in self._left:
            return (
                f"{self.named(0)}, through which the ranks know of each other, has died (it "
                f"closed: {self.lost}): killed, crashed or out of memory; its log may say more"
            )
        return None

    def different_calls(self, serial: int) -> str | None:
        """The calls of the ranks, if they wait for each other in different calls; None if not.

        Args:
            serial: The number of this rank's wait; reports for other waits are ignored.
        """
        told = self._different_calls
        return told[1] if told is not None and told[0] == serial else None

    def failure(self, scope: Scope, waited: float, *, silence: float | None = None) -> str | None:
        """Why a wait for the ranks of `scope` cannot complete; None if no reason is known.

        Args:
            scope: The ranks.
            waited: Seconds that this rank has waited.
            silence: After a collective has failed: the seconds of silence that explain it. None
                while this rank waits: then a rank that has ended is a reason only after two ticks,
                because it may have done its part before.
        """
        cause = self.cause()
        if cause is not None:
            return cause
        if waited > 2 * TICK or silence is not None:
            for rank in sorted({0, *scope.ranks} & self._left.keys()):
                return f"{self.named(rank)} {self._left[rank]}; its log may say why"
        return self._silence(scope, silence) or self._lateness(scope, waited)

    def failure_message(self, failure: str, what: str) -> str:
        """The message of an error: `failure` is why a wait for `what` cannot complete."""
        if re.match(rf"rank {self.rank}\b", failure):
            return (
                f"{failure}. That ended the run on all ranks, so rank {self.rank} cannot begin "
                f"{what}; start the ranks again, from the last checkpoint. To skip a batch whose "
                "forward fails, run the forward before last_backward() and let all ranks skip the "
                "step: docs/gradient_synchronization.md has an example"
            )
        return f"{failure}. Rank {self.rank} waited {self.phase} for {what}."

    def _silence(self, scope: Scope, limit: float | None) -> str | None:
        setting = ""
        if limit is None:
            limit = scope.limits.peer_timeout
            setting = f" (peer_timeout is {limit:.0f} s)"
        of_server = max(self.server_quiet * TICK, self._silent.get(0, 0.0))
        for rank in sorted({0, *scope.ranks} - {self.rank}):
            silent = self._silent.get(rank, 0.0) if rank else of_server
            if silent > limit:
                return (
                    f"{self.named(rank)} has shown no sign of life for {silent:.0f} s{setting}: it "
                    "is stopped, or its machine cannot be reached"
                )
        return None

    def _lateness(self, scope: Scope, waited: float) -> str | None:
        if waited <= scope.limits.stall_timeout:
            return None
        # The control server reports which ranks wait, too.
        others = {*scope.ranks} - {self.rank}
        missing = others - self._waiting.get(scope.ranks_key, frozenset()) or others
        hosts = ", ".join(sorted({self._hosts[str(rank)] for rank in missing if self._hosts}))
        return (
            f"rank {', '.join(map(str, sorted(missing)))}{hosts and f' on {hosts}'} did not come "
            f"within {waited:.0f} s (stall_timeout) although it shows signs of life"
        )


def where(groups: list[Message]) -> str:
    """Which ranks are at which call: ``rank 0, 1 is at A, rank 2 is at B``."""
    return ", ".join(
        f"rank {', '.join(map(str, group['ranks']))} is at {group['label']}" for group in groups
    )


def _described(end: Message) -> str:
    rank, host, kind = end["rank"], end.get("host"), end["kind"]
    named = f"rank {rank} on {host}" if host else f"rank {rank}"
    if kind == "gone":
        return (
            f"{named} has died (its connection was closed): killed, crashed or out of memory; "
            "its log may say more"
        )
    if kind == "refused":
        return (
            f"{named} has another key than rank 0; {CONTROL_KEY} must be the same on all machines"
        )
    if kind == "absent":
        return (
            f"{named} did not connect in time: its process was not started or has died before; "
            "its log may say why"
        )
    return f"{named} failed {end['phase']}: {str(end['message']).rstrip('.')}"


def ranks_at_different_calls(where_the_ranks_are: str) -> SyncError:
    """The error of ranks that wait for each other in different calls."""
    return SyncError(
        f"the ranks are not in the same place of the program: {where_the_ranks_are}. Every rank "
        "must take the same number of steps and make the same calls in the same order."
    )


def one_line(error: BaseException) -> str:
    """Class and text of an error in one line, for the other ranks."""
    name = type(error).__name__
    return f"{name}: {' '.join(str(error).split())[:_LONGEST_CAUSE]}" if str(error) else name
