"""The second run of a recomputed call, compared with the first."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle

from paddle_recompute._nested import describe, dtype_name
from paddle_recompute._paddle.saved_tensors import (
    Look,
    Looks,
    dtype_in,
    each_look,
    look_of,
    looks_of,
    version_of,
    without_graph,
)
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute._hooks import Kept
from paddle_recompute.replay import REPETITION_ADVICE, Call, RngState


class KeptCall(NamedTuple):
    """A call of `keep` in the first run of a function.

    Attributes:
        part: What it has kept.
        streams: The random streams behind it; None: the function does not restore them.
        num_saved: How many tensors the function had saved behind it.
        is_alone: Whether no other recomputed function has it too.
    """

    part: Any
    streams: RngState | None
    num_saved: int
    is_alone: bool


class EndOfForward(BaseException):
    """Ends a second run at the last call of `keep`, behind which nothing is saved.

    Whatever the function does with it: behind that call, nothing counts.
    """


class Repetition:
    """Keeps what operators save in a second run, and gives it to the tickets of the first.

    Attributes:
        call: The call that runs.
        kept: What `keep` kept in its first run, in order.
        end: That of these at which the run ends; None: it runs to its end.
        has_ended: Whether it has come there.

    Args:
        call: As above.
        kept: As above.
        end: As above.
        looks: Of the tensors that were saved in the first run.
        checksums: Of their values, by number; empty: values are not compared.
        tickets: Of the first run; None where it is not in the graph any more.
    """

    __slots__ = ("_checksums", "_difference", "_first", "_is_careful", "_is_matched", "_kept",
                 "_layouts", "_looks", "_tickets", "_versions", "call", "end", "has_ended",
                 "kept")  # fmt: skip

    def __init__(
        self,
        call: Call,
        kept: Sequence[KeptCall],
        end: KeptCall | None,
        looks: Looks,
        checksums: dict[int, int],
        tickets: Sequence[Kept | None],
    ) -> None:
        self.call, self.kept, self.end, self.has_ended = call, iter(kept), end, False
        self._first, self._checksums, self._tickets = looks, checksums, tickets
        self._kept: list[Any] = []
        """Tensors; None where there is no ticket any more."""
        self._versions: list[int] = []
        self._looks: list[Look] = []
        """Those of the first run, once one of them is compared by itself."""
        self._layouts: dict[int, Look] = {}
        """The looks of the first run where a tensor lies otherwise in its memory."""
        self._difference: str | None = None
        self._is_matched = True
        self._is_careful = bool(checksums) or not all(tickets)

    def pack(self, tensor: paddle.Tensor) -> None:
        """Keep the tensor, without its graph."""
        kept = without_graph(tensor)
        self._kept.append(kept)
        self._versions.append(version_of(kept))
        if self._is_careful and len(self._kept) <= len(self._tickets):
            self._look_now(len(self._kept) - 1, kept)

    def _look_now(self, count: int, tensor: paddle.Tensor) -> None:
        """Compare a tensor while its values are those that were saved; it is not kept if its ticket
        is not in the graph any more.
        """
        self._compare(count, tensor)
        if self._tickets[count] is None:
            self._kept[count] = None
        elif self._checksums.get(count) not in (None, checksum(tensor)):
            self._note(count, f"({describe(tensor)}) has other values than in the first one")

    def _compare(self, count: int, tensor: paddle.Tensor) -> None:
        """Note where a tensor differs from that of the first run, or lies otherwise in its memory:
        a reloaded input or a copied buffer may do so.
        """
        self._looks = self._looks or each_look(self._first)
        was, look = self._looks[count], look_of(tensor)
        if was == look:
            return
        self._layouts[count] = was
        if was[0] != look[0] or was[3] != look[3]:
            # Then it is not known which tensor is which, though others may be alike by chance.
            self._is_matched = False
            then = f"{dtype_name(dtype_in(was))}{[*was[3]]}"
            self._note(count, f"was {then}, now it is {describe(tensor)}")

    def _note(self, count: int, difference: str) -> None:
        """Note the first difference."""
        if self._difference is None:
            place = f"saved tensor {count} of {len(self._tickets)}"
            self._difference = f"{place} {difference}"

    def finish(self) -> None:
        """Compare the two runs, and give the tensors to the tickets.

        Raises:
            RecomputeError: They saved different tensors, and the check is on or a ticket has no
                tensor; or it calls `keep` less often.
        """
        kept, num_saved = self._kept, len(self._tickets)
        if self.has_ended:
            del kept[num_saved:]
        elif (skipped := next(self.kept, None)) is not None:
            raise RecomputeError(
                f"The second forward of {self.call.name} does not call {skipped.part.name}, its "
                f"first forward did. {REPETITION_ADVICE}"
            )
        if not self._is_careful and looks_of(kept) != self._first:
            for count in range(min(len(kept), num_saved)):
                # What was changed in place since raises when it is asked for.
                if version_of(kept[count]) == self._versions[count]:
                    self._compare(count, kept[count])
        if len(kept) != num_saved:
            self._difference = self._difference or (
                f"{num_saved} tensors were saved for the backward, now {len(kept)}"
            )
        is_matched = self._is_matched and len(kept) >= num_saved
        if self._difference is not None and (self.call.check or not is_matched):
            raise RecomputeError(
                f"The second forward of {self.call.name} is not a repetition of the first: "
                f"{self._difference}. {REPETITION_ADVICE}"
            )
        for ticket, tensor, version in zip(self._tickets, kept, self._versions, strict=False):
            if ticket is not None:
                ticket.tensor, ticket.version, ticket.layout = tensor, version, None
        for count, layout in self._layouts.items():
            if (ticket := self._tickets[count]) is not None:
                ticket.layout = layout


def checksum(tensor: paddle.Tensor) -> int:
    """Of the values, which are copied to the host."""
    return zlib.crc32(tensor.numpy().tobytes())
