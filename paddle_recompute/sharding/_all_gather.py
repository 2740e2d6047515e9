"""All-gather of updated parameters: each owner broadcasts its parameters, segment by segment.

With gloo, ranks of even and of odd number broadcast at the same time, so that a link between two
ranks is used in both directions. Each of the two has two lanes: one sends while the other waits for
its receivers. A device broadcasts on a stream of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.flat import joined
from paddle_recompute._paddle.layers import is_parameter
from paddle_recompute.distributed import (
    Scope,
    is_gloo,
    lane_of,
    run_collective,
    scope_of,
)

SEGMENT_BYTES = 4 * 2**20
"""The most bytes of a buffer."""
LANES = tuple(f"parameters of {ranks} ranks, {i}" for i in (1, 2) for ranks in ("even", "odd"))

Piece = tuple[int, list[paddle.Tensor]]
"""The number of the owner, and tensors of one dtype that it broadcasts in one buffer."""


class ParameterAllGather:
    """Brings the parameters of all owners to all ranks.

    Args:
        parts: What each rank of `group` owns.
        parameters: The same in the order of the forward.
        group: The ranks; None is all of them.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[paddle.Tensor]],
        parameters: Sequence[paddle.Tensor],
        group: Group | None,
    ) -> None:
        self._group = group
        ranks = self._scope.ranks
        owner = {id(p): rank for rank, part in zip(ranks, parts, strict=True) for p in part}
        filled = [parameter for parameter in parameters if parameter.size]
        self._pieces = [piece for segment in _segments(filled) for piece in _pieces(segment, owner)]
        self._of_lanes: list[list[Piece]] = [[] for _ in LANES]
        num_before = [0, 0]
        for piece in self._pieces:
            parity = ranks.index(piece[0]) % 2
            self._of_lanes[parity + 2 * (num_before[parity] % 2)].append(piece)
            num_before[parity] += 1
        self._is_gloo = is_gloo(group)
        for name in LANES if self._is_gloo else ():
            lane_of(self._scope, name)  # made now, and not in the first step

    @property
    def _scope(self) -> Scope:
        """With the limits of now: those of a `GradientSync` that was made later count, too."""
        return scope_of(self._group)

    def send(self, number: int) -> None:
        """Give every rank what the owners have after update `number`."""
        label = f"the parameters of update {number} from their owners"
        if not self._is_gloo:
            run_collective(lambda: _carry_all(self._pieces, self._group), label, self._group)
        else:
            for job in [
                lane_of(self._scope, name).begin(functools.partial(_carry_all, pieces), label)
                for name, pieces in zip(LANES, self._of_lanes, strict=True)
            ]:
                job.wait()


def _segments(parameters: Sequence[paddle.Tensor]) -> list[list[paddle.Tensor]]:
    """`parameters` in runs of at most `SEGMENT_BYTES`, or of a part of the largest of them: there
    is a buffer in each lane.
    """
    limit = min(SEGMENT_BYTES, max(map(_bytes, parameters), default=0) // len(LANES))
    segments: list[list[paddle.Tensor]] = []
    size = limit
    for parameter in parameters:
        size += _bytes(parameter)
        if size > limit:
            segments.append([])
            size = _bytes(parameter)
        segments[-1].append(parameter)
    return segments


def _pieces(segment: Sequence[paddle.Tensor], owner: dict[int, int]) -> list[Piece]:
    found: dict[tuple[int, str], list[paddle.Tensor]] = {}
    for parameter in segment:
        found.setdefault((owner[id(parameter)], str(parameter.dtype)), []).append(parameter)
    return [(rank, tensors) for (rank, _), tensors in found.items()]


@paddle.no_grad()
def _carry_all(pieces: Sequence[Piece], group: Group | None = None) -> None:
    for owner, tensors in pieces:
        _carry(owner, tensors, group)


def _carry(owner: int, tensors: Sequence[paddle.Tensor], group: Group | None) -> None:
    """Into the memory that `tensors` have: what has noted their addresses stays right."""
    if len(tensors) == 1:
        dist.broadcast(tensors[0], src=owner, group=group)
        return
    is_own = dist.get_rank() == owner
    sizes = [int(tensor.size) for tensor in tensors]
    flat = joined(tensors, []) if is_own else paddle.empty([sum(sizes)], tensors[0].dtype)
    dist.broadcast(flat, src=owner, group=group)
    begin = 0
    for tensor, size in zip(tensors, sizes, strict=True) if not is_own else ():
        piece = flat[begin : begin + size].reshape(tensor.shape)
        if is_parameter(tensor):  # not assign(), which raises inplace_version, as no optimizer does
            tensor.copy_(piece, False)
        else:  # not copy_(), which counts another write than that of the update (`note_write`)
            paddle.assign(piece, tensor)
        begin += size


def _bytes(tensor: paddle.Tensor) -> int:
    return int(tensor.size * tensor.element_size())
