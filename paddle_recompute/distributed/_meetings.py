"""Where ranks meet: whether all are here, whether they say the same, and who waits for whom.

Each rank sends a digest of what it has to say. The contents are fetched only where the digests
differ, from one rank for each of them, for the words of the error. So a meeting costs each rank one
short message and one short answer, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paddle_recompute.distributed.control_wire import Message, ranges

MOST_CONTENTS = 8
"""Of how many different contents the ranks are told. The message of an error has room for few."""
SETTLED = 2
"""Ticks without any change after which ranks that wait at different places wait for each other."""

Tell = Callable[[int, Message], None]


@dataclass
class _Said:
    label: str
    digest: str


@dataclass
class _Meeting:
    """One that not all have come to yet, or whose contents are being fetched."""

    arrived: dict[int, _Said] = field(default_factory=dict)
    asked: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    contents: dict[int, object] = field(default_factory=dict)


class Meetings:
    """All meetings of a run.

    Args:
        tell: Sends a message to a rank.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._open: dict[str, _Meeting] = {}

    def come(
        self,
        rank: int,
        channel: str,
        size: int,
        label: str,
        digest: str,
        everything: bool = False,
    ) -> None:
        """`rank` is at a meeting of `size` ranks; the last one to come brings the answer."""
        meeting = self._open.setdefault(channel, _Meeting())
        meeting.arrived[rank] = _Said(label, digest)
        if len(meeting.arrived) < size:
            return
        arrived = meeting.arrived
        by_content: dict[tuple[str, str], list[int]] = {}
        for one in sorted(arrived):
            by_content.setdefault((arrived[one].label, arrived[one].digest), []).append(one)
        if len(by_content) == 1:
            del self._open[channel]
            for one in arrived:
                self._tell(one, {"kind": "met", "channel": channel})
            return
        most = None if everything else MOST_CONTENTS
        for (said, _), ranks in [*by_content.items()][:most]:
            meeting.asked[ranks[0]] = (said, ranks)
        for one in meeting.asked:
            self._tell(one, {"kind": "say", "channel": channel})

    def take_content(self, rank: int, channel: str, content: object) -> None:
        """What `rank` had to say, after it was asked."""
        meeting = self._open.get(channel)
        if meeting is None or rank not in meeting.asked:
            return
        meeting.contents[rank] = content
        if len(meeting.contents) < len(meeting.asked):
            return
        del self._open[channel]
        groups = [
            {"label": label, "ranks": ranges(ranks), "content": meeting.contents[one]}
            for one, (label, ranks) in meeting.asked.items()
        ]
        answer: Message = {"kind": "met", "channel": channel, "groups": groups}
        for one in meeting.arrived:
            self._tell(one, answer)


@dataclass
class _Wait:
    serial: int
    place: str
    label: str
    size: int


class Waits:
    """Who has waited for more than a tick, and where: whom the others wait for, and whether all
    wait at different places, so that nobody will ever go on.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._waits: dict[str, dict[int, _Wait]] = {}  # by the ranks that wait for each other
        self._unchanged: dict[str, int] = {}

    def begin(self, rank: int, among: str, size: int, serial: int, place: str, label: str) -> None:
        """`rank` waits for the ranks `among`, `size` of them."""
        self.end(rank)
        self._waits.setdefault(among, {})[rank] = _Wait(serial, place, label, size)
        self._unchanged[among] = 0

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
            here = ranges([*waits])
            by_place: dict[str, list[int]] = {}
            for rank, wait in sorted(waits.items()):
                by_place.setdefault(wait.place, []).append(rank)
            size = min(wait.size for wait in waits.values())
            apart = [
                {"label": waits[ranks[0]].label, "ranks": ranges(ranks)}
                for ranks in [*by_place.values()][:MOST_CONTENTS]
            ]
            for rank, wait in waits.items():
                news: Message = {"kind": "waiting", "among": among, "ranks": here}
                if len(waits) == size and len(by_place) > 1:
                    news |= {"serial": wait.serial, "apart": apart}
                self._tell(rank, news)
