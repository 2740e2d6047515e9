"""The second forward of a recomputed call, compared with the first."""

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
    """A call of `keep` in the first forward of a function.

    Attributes:
        part: The kept part, with its outputs.
        streams: The RNG state after it; None: the function does not restore RNG state.
        num_saved: The number of tensors that the function had saved up to its end.
        is_alone: Whether it belongs to no other recomputed function.
    """

    part: Any
    streams: RngState | None
    num_saved: int
    is_alone: bool


class EndOfForward(BaseException):
    """Ends a second forward at the last call of `keep`, if nothing is saved after it.

    The function may catch it: what it does after that call has no effect.
    """


class Recomputation:
    """Records the tensors that a second forward saves, and hands them to the handles of the first.

    Attributes:
        call: The call.
        kept: The calls of `keep` of the first forward, in order.
        end: The call of `keep` at which the second forward ends; None: it runs to its end.
        has_ended: Whether the second forward has reached `end`.

    Args:
        call: As above.
        kept: As above.
        end: As above.
        metadata: The metadata of the tensors that the first forward saved.
        checksums: The checksums of their values, by number; empty: values are not compared.
        handles: The handles of the first forward; None for those that the graph has freed.
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
        """The saved tensors; None if the graph has freed the handle."""
        self._versions: list[int] = []
        self._metadata: list[TensorMetadata] = []
        """The metadata of the first forward, made when a single tensor is compared."""
        self._layouts: dict[int, TensorMetadata] = {}
        """The metadata of the first forward for tensors whose strides or offset differ."""
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
        """Compare a tensor before it can be written to; drop it if the graph has freed its
        handle.
        """
        self._compare(count, tensor)
        if self._handles[count] is None:
            self._kept[count] = None
        elif self._checksums.get(count) not in (None, checksum(tensor)):
            self._note(count, f"({describe(tensor)}) has other values than in the first one")

    def _compare(self, count: int, tensor: paddle.Tensor) -> None:
        """Note a difference to the first forward. Strides and offset may differ: those of reloaded
        inputs and copied buffers do.
        """
        self._metadata = self._metadata or each_metadata(self._first)
        was, metadata = self._metadata[count], metadata_of(tensor)
        if was == metadata:
            return
        self._layouts[count] = was
        if was[0] != metadata[0] or was[3] != metadata[3]:
            # From here on, tensors and handles may belong to different operators.
            self._is_matched = False
            then = f"{dtype_name(dtype_in(was))}{[*was[3]]}"
            self._note(count, f"was {then}, now it is {describe(tensor)}")

    def _note(self, count: int, difference: str) -> None:
        """Note the first difference."""
        if self._difference is None:
            place = f"saved tensor {count} of {len(self._handles)}"
            self._difference = f"{place} {difference}"

    def finish(self) -> None:
        """Compare the two forwards, and hand the tensors to the handles.

        Raises:
            RecomputeError: They saved different tensors, and the check is on or a handle would get
                no tensor; or the second one calls `keep` less often.
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
                # A tensor that was changed in place raises when it is unpacked.
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
    """The CRC-32 of the values, which are copied to the host."""
    return zlib.crc32(tensor.numpy().tobytes())
