"""Where ranks meet: whether all are here and what each says, and who waits for whom."""

from __future__ import annotations

import json
from collections.abc import Callable

from paddle_recompute.distributed.control_wire import Message

SETTLED = 2
"""Ticks without any change after which ranks that wait at different places wait for each other."""
_MOST_PLACES = 8

Tell = Callable[[int, Message], None]


class Exchanges:
    """The exchanges that not all ranks have arrived at yet.

    Args:
        tell: Sends a message to a rank.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._arrived: dict[str, dict[int, Message]] = {}

    def arrive(self, rank: int, said: Message) -> None:
        """`rank` is at the exchange; the last rank to arrive brings the answer to all.

        The answer lists the ranks by what they say, at most ``said["most"]`` different things (0:
        all of them), without the list of ranks where all say the same.
        """
        channel = said["channel"]
        arrived = self._arrived.setdefault(channel, {})
        arrived[rank] = said
        if len(arrived) < said["size"]:
            return
        del self._arrived[channel]
        groups: dict[str, Message] = {}
        for peer in sorted(arrived):
            told = {"label": arrived[peer]["label"], "value": arrived[peer].get("value")}
            groups.setdefault(json.dumps(told), {**told, "ranks": []})["ranks"].append(peer)
        listed = [*groups.values()][: said["most"] or None]
        if len(groups) == 1:
            listed[0]["ranks"] = None
        for peer in arrived:
            self._tell(peer, {"kind": "met", "channel": channel, "groups": listed})


class Waits:
    """Who has waited for more than a tick, and where: whom the others wait for, and whether all
    wait at different places, so that no rank can continue.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._waits: dict[str, dict[int, Message]] = {}  # by the ranks that wait for each other
        self._unchanged: dict[str, int] = {}

    def begin(self, rank: int, said: Message) -> None:
        """`rank` waits for the ranks ``said["among"]``, ``said["size"]`` of them."""
        self.end(rank)
        self._waits.setdefault(said["among"], {})[rank] = said
        self._unchanged[said["among"]] = 0

    def end(self, rank: int) -> None:
        """`rank` does not wait any more."""
        for among, waits in [*self._waits.items()]:
            if waits.pop(rank, None) is not None:
                self._unchanged[among] = 0
            if not waits:
                del self._waits[among], self._unchanged[among]

    def tick(self) -> None:
        """Tell, where things have not changed for some ticks: once, and all who wait."""
        for among, waits in self._waits.items():
            self._unchanged[among] += 1
            if self._unchanged[among] != SETTLED:
                continue
            by_call: dict[str, list[int]] = {}
            for rank, wait in sorted(waits.items()):
                by_call.setdefault(wait["call"], []).append(rank)
            news: Message = {"kind": "waiting", "among": among, "ranks": sorted(waits)}
            if len(waits) == min(wait["size"] for wait in waits.values()) and len(by_call) > 1:
                news["different_calls"] = [
                    {"label": waits[ranks[0]]["label"], "ranks": ranks}
                    for ranks in [*by_call.values()][:_MOST_PLACES]
                ]
            for rank, wait in waits.items():
                self._tell(
                    rank, {**news, "serial": wait["serial"]} if "different_calls" in news else news
                )
