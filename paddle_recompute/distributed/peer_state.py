"""What a rank has heard of the others, and whether waiting for them is in vain."""

from __future__ import annotations

from dataclasses import dataclass, field

from paddle_recompute.distributed.control_server import TICK, Message


@dataclass(frozen=True)
class Limits:
    """How long to wait for others.

    Attributes:
        peer_timeout: Seconds without a sign of life after which a rank is given up.
        stall_timeout: Seconds to wait for a rank that lives but does not come.
    """

    peer_timeout: float = 30.0
    stall_timeout: float = 1800.0


@dataclass(frozen=True)
class Scope:
    """For whom one waits, and what for.

    Attributes:
        ranks: The global ranks concerned, this one among them.
        name: Separates the messages and failures of one `GradientSync` from those of another; the
            same on all ranks.
        limits: How long to wait.
    """

    ranks: tuple[int, ...]
    name: str
    limits: Limits

    @property
    def key(self) -> str:
        """The scope on the wire."""
        return f"{self.ranks}/{self.name}"


@dataclass
class PeerState:
    """What the control server has said of the other ranks. One thread writes, others read.

    Attributes:
        rank: This rank.
        lost: Why there is no connection to the control server any more; None while there is one.
        hub_quiet: Ticks of this process since it last heard of the control server.
    """

    rank: int
    lost: str | None = None
    server_quiet: int = 0
    _silent: dict[int, float] = field(default_factory=dict)
    _missing: dict[str, list[int]] = field(default_factory=dict)
    _ended: dict[int, Message] = field(default_factory=dict)
    _failures: list[Message] = field(default_factory=list)

    def take(self, message: Message) -> None:
        """Note what the control server says."""
        if message["kind"] == "alive":
            self._silent = {int(rank): float(s) for rank, s in message["silent"].items()}
            self._missing = message["missing"]
        elif message["kind"] == "failed":
            self._failures.append(message)
        else:
            self._ended[message["rank"]] = message

    def trouble(self, scope: Scope, waited: float, *, patience: float | None = None) -> str | None:
        """Why waiting for the ranks of `scope` is in vain; None if it is not, as far as known.

        Args:
            scope: The ranks.
            waited: Seconds that this one has waited for them.
            patience: None while this rank waits: a rank that ended in good order is no reason at
                once then, it may have done its part before. After a collective has failed: the
                seconds of silence that explain it.
        """
        # Failures of this rank too: its courier must not wait on for a scope that the main thread
        # has given up.
        told = [failure for failure in self._failures if failure["scope"] == scope.key]
        told += [self._ended[rank] for rank in {0, *scope.ranks} if rank in self._ended]
        if waited <= 2 * TICK and patience is None:
            told = [end for end in told if not _is_regular(end)]
        if told:
            # Who ended because of another comes after that other.
            return _described(min(told, key=lambda end: bool(end.get("is_peer_error"))))
        if self.lost is not None and 0 not in self._ended:
            return (
                "rank 0, through which the ranks know of each other, has died (its connection was "
                f"closed: {self.lost}): killed, crashed or out of memory; its log may say more"
            )
        return self._silence(scope, patience) or self._lateness(scope, waited)

    def _silence(self, scope: Scope, patience: float | None) -> str | None:
        limit = scope.limits.peer_timeout if patience is None else patience
        setting = f" (peer_timeout is {limit:.0f} s)" if patience is None else ""
        of_server = max(self.server_quiet * TICK, self._silent.get(0, 0.0))
        for rank in sorted({0, *scope.ranks} - {self.rank}):
            silent = self._silent.get(rank, 0.0) if rank else of_server
            if silent > limit:
                return (
                    f"rank {rank} has shown no sign of life for {silent:.0f} s{setting}: it is "
                    "stopped, or its machine cannot be reached"
                )
        return None

    def _lateness(self, scope: Scope, waited: float) -> str | None:
        if waited <= scope.limits.stall_timeout:
            return None
        # As far as the control server knows; it tells once per tick.
        missing = {
            rank
            for channel, ranks in self._missing.items()
            if channel.startswith(f"{scope.ranks}/")
            for rank in ranks
        } or {*scope.ranks} - {self.rank}
        return (
            f"rank {', '.join(map(str, sorted(missing)))} did not come within {waited:.0f} s "
            "(stall_timeout) although it shows signs of life"
        )


def _is_regular(end: Message) -> bool:
    return end["kind"] == "left" and end["message"] is None


def _described(end: Message) -> str:
    rank = end["rank"]
    if end["kind"] == "gone":
        return (
            f"rank {rank} has died (its connection was closed): killed, crashed or out of memory; "
            "its log may say more"
        )
    if _is_regular(end):
        return f"rank {rank} has ended {end['place']}; its log may say why"
    return f"rank {rank} failed {end['place']}: {str(end['message']).rstrip('.')}"
