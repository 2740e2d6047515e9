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
        rng_state: The RNG state after the call; None: RNG state is not restored.
        num_saved: The number of tensors that the function had saved when the call returned.
        is_alone: Whether no enclosing recomputed function records this call, too.
    """

    part: Any
    rng_state: RngState | None
    num_saved: int
    is_alone: bool


class StopRecomputation(BaseException):
    """Stops a second forward early, after the last `keep`: no later operator saves a tensor.

    If the function catches it, what it does afterwards is ignored.
    """


class Recomputation:
    """Records the tensors that a second forward saves, and hands them to the handles of the first.

    Attributes:
        call: The call.
        kept: The calls of `keep` of the first forward, in order.
        end: The call of `keep` after which the second forward stops; None: it runs to completion.
        has_ended: Whether it has stopped after `end`.

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
        self._first_metadata, self._checksums, self._handles = metadata, checksums, handles
        self._recomputed: list[Any] = []
        """The tensors that the second forward saves; None if the graph has freed the handle."""
        self._versions: list[int] = []
        self._flags: list[bool] = []
        self._each_first_metadata: list[TensorMetadata] = []
        """`_first_metadata` per tensor; made when a single tensor is compared."""
        self._layouts: dict[int, TensorMetadata] = {}
        """First-forward metadata of tensors whose strides or offset differ in the second."""
        self._difference: str | None = None
        self._is_matched = True
        self._checks_each_tensor = bool(checksums) or not all(handles)

    def pack(self, tensor: paddle.Tensor) -> None:
        """Keep the tensor, without its graph."""
        self._flags.append(tensor.stop_gradient)
        tensor = without_graph(tensor)
        self._recomputed.append(tensor)
        self._versions.append(version_of(tensor))
        if self._checks_each_tensor and len(self._recomputed) <= len(self._handles):
            self._check_on_pack(len(self._recomputed) - 1, tensor)

    def _check_on_pack(self, index: int, tensor: paddle.Tensor) -> None:
        """Compare a tensor when it is saved, before it can change in place; drop it if the graph
        has freed its handle.
        """
        self._compare_metadata(index, tensor)
        if self._handles[index] is None:
            self._recomputed[index] = None
        elif self._checksums.get(index) not in (None, checksum(tensor)):
            self._note(index, f"({describe(tensor)}) has other values than in the first one")

    def _compare_metadata(self, index: int, tensor: paddle.Tensor) -> None:
        """Note a difference to the first forward. Strides and offset may differ: those of reloaded
        inputs and copied buffers do.
        """
        self._each_first_metadata = self._each_first_metadata or each_metadata(self._first_metadata)
        was, metadata = self._each_first_metadata[index], metadata_of(tensor)
        if was == metadata:
            return
        self._layouts[index] = was
        if was[0] != metadata[0] or was[3] != metadata[3]:
            # Tensors cannot be matched to handles any more, even where the rest agrees by chance.
            self._is_matched = False
            then = f"{dtype_name(dtype_in(was))}{[*was[3]]}"
            self._note(index, f"was {then}, now it is {describe(tensor)}")

    def _note(self, index: int, difference: str) -> None:
        """Note the first difference."""
        if self._difference is None:
            place = f"saved tensor {index} of {len(self._handles)}"
            self._difference = f"{place} {difference}"

    def finish(self) -> None:
        """Compare the two forwards, and hand the tensors to the handles.

        Raises:
            RecomputeError: A handle would get no tensor, or one of another shape or dtype; the
                check is on and there is any other difference; or `keep` is called less often.
        """
        tensors, num_saved = self._recomputed, len(self._handles)
        if self.has_ended:
            del tensors[num_saved:]
        elif (skipped := next(self.kept, None)) is not None:
            raise RecomputeError(
                f"The second forward of {self.call.name} does not call {skipped.part.name}, its "
                f"first forward did. {RECOMPUTATION_ADVICE}"
            )
        if not self._checks_each_tensor and metadata_lists_of(tensors) != self._first_metadata:
            for index in range(min(len(tensors), num_saved)):
                # If a tensor was changed in place since, its handle raises when it is unpacked.
                if version_of(tensors[index]) == self._versions[index]:
                    self._compare_metadata(index, tensors[index])
        if len(tensors) != num_saved:
            self._difference = self._difference or (
                f"{num_saved} tensors were saved for the backward, now {len(tensors)}"
            )
        is_matched = self._is_matched and len(tensors) >= num_saved
        if self._difference is not None and (self.call.check or not is_matched):
            raise RecomputeError(
                f"The second forward of {self.call.name} is not a repetition of the first: "
                f"{self._difference}. {RECOMPUTATION_ADVICE}"
            )
        rows = zip(self._handles, tensors, self._versions, self._flags, strict=False)
        for handle, tensor, version, flag in rows:
            if handle is not None:
                handle.tensor, handle.version, handle.layout = tensor, version, None
                handle.stop_gradient = flag
        for index, layout in self._layouts.items():
            if (handle := self._handles[index]) is not None:
                handle.layout = layout


def checksum(tensor: paddle.Tensor) -> int:
    """The CRC-32 of the values, which are copied to the host."""
    return zlib.crc32(tensor.numpy().tobytes())
