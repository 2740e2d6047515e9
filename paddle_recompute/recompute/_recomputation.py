"""The second run of a recomputed call, compared with the first."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import paddle

from paddle_recompute._nested import describe, dtype_name
from paddle_recompute._paddle.saved_tensors import (
    MetadataLists,
    TensorMetadata,
    dtype_in,
    each_metadata,
    metadata_lists_of,
    metadata_of,
    version_of,
    without_graph,
)
from paddle_recompute.captured_state import RECOMPUTATION_ADVICE, Call, RngState
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute._hooks import SavedHandle


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


class Recomputation:
    """Keeps what operators save in a second run, and gives it to the handles of the first.

    Attributes:
        call: The call that runs.
        kept: What `keep` kept in its first run, in order.
        end: That of these at which the run ends; None: it runs to its end.
        has_ended: Whether it has come there.

    Args:
        call: As above.
        kept: As above.
        end: As above.
        metadata: Of the tensors that were saved in the first run.
        checksums: Of their values, by number; empty: values are not compared.
        handles: Of the first run; None where it is not in the graph any more.
    """

    def __init__(
        self,
        call: Call,
        kept: Sequence[KeptCall],
        end: KeptCall | None,
        metadata: MetadataLists,
        checksums: dict[int, int],
        handles: Sequence[SavedHandle | None],
    ) -> None:
        self.call, self.kept, self.end, self.has_ended = call, iter(kept), end, False
        self._first, self._checksums, self._handles = metadata, checksums, handles
        self._kept: list[Any] = []
        """Tensors; None where there is no handle any more."""
        self._versions: list[int] = []
        self._metadata: list[TensorMetadata] = []
        """Those of the first run, once one of them is compared by itself."""
        self._layouts: dict[int, TensorMetadata] = {}
        """The metadata of the first run where a tensor lies otherwise in its memory."""
        self._difference: str | None = None
        self._is_matched = True
        self._checks_each_tensor = bool(checksums) or not all(handles)

    def pack(self, tensor: paddle.Tensor) -> None:
        """Keep the tensor, without its graph."""
        kept = without_graph(tensor)
        self._kept.append(kept)
        self._versions.append(version_of(kept))
        if self._checks_each_tensor and len(self._kept) <= len(self._handles):
            self._compare_metadata(len(self._kept) - 1, kept)

    def _compare_metadata(self, count: int, tensor: paddle.Tensor) -> None:
        """Compare a tensor while its values are those that were saved; it is not kept if its handle
        is not in the graph any more.
        """
        self._compare(count, tensor)
        if self._handles[count] is None:
            self._kept[count] = None
        elif self._checksums.get(count) not in (None, checksum(tensor)):
            self._note(count, f"({describe(tensor)}) has other values than in the first one")

    def _compare(self, count: int, tensor: paddle.Tensor) -> None:
        """Note where a tensor differs from that of the first run, or lies otherwise in its memory:
        a reloaded input or a copied buffer may do so.
        """
        self._metadata = self._metadata or each_metadata(self._first)
        was, metadata = self._metadata[count], metadata_of(tensor)
        if was == metadata:
            return
        self._layouts[count] = was
        if was[0] != metadata[0] or was[3] != metadata[3]:
            # Then it is not known which tensor is which, though others may be alike by chance.
            self._is_matched = False
            then = f"{dtype_name(dtype_in(was))}{[*was[3]]}"
            self._note(count, f"was {then}, now it is {describe(tensor)}")

    def _note(self, count: int, difference: str) -> None:
        """Note the first difference."""
        if self._difference is None:
            place = f"saved tensor {count} of {len(self._handles)}"
            self._difference = f"{place} {difference}"

    def finish(self) -> None:
        """Compare the two runs, and give the tensors to the handles.

        Raises:
            RecomputeError: They saved different tensors, and the check is on or a handle has no
                tensor; or it calls `keep` less often.
        """
        kept, num_saved = self._kept, len(self._handles)
        if self.has_ended:
            del kept[num_saved:]
        elif (skipped := next(self.kept, None)) is not None:
            raise RecomputeError(
                f"The second forward of {self.call.name} does not call {skipped.part.name}, its "
                f"first forward did. {RECOMPUTATION_ADVICE}"
            )
        if not self._checks_each_tensor and metadata_lists_of(kept) != self._first:
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
                f"{self._difference}. {RECOMPUTATION_ADVICE}"
            )
        for handle, tensor, version in zip(self._handles, kept, self._versions, strict=False):
            if handle is not None:
                handle.tensor, handle.version, handle.layout = tensor, version, None
        for count, layout in self._layouts.items():
            if (handle := self._handles[count]) is not None:
                handle.layout = layout


def checksum(tensor: paddle.Tensor) -> int:
    """Of the values, which are copied to the host."""
    return zlib.crc32(tensor.numpy().tobytes())
