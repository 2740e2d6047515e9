"""A differentiable all-gather of rows."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle
import paddle.distributed as dist
from paddle.distributed.communication.group import Group

from paddle_recompute import _paddle
from paddle_recompute.contrastive._single_backward import SingleBackwardGuard
from paddle_recompute.distributed import is_distributed, run_collective
from paddle_recompute.errors import DataError, StaticGraphError, SyncError


def all_gather_with_grad(tensor: paddle.Tensor, group: Group | None = None) -> paddle.Tensor:
    """Join the rows of all ranks, in the order of the ranks; the result is differentiable.

    The gradient is exact: what any rank's loss owes to this rank's rows comes back to them, so the
    gradient of `tensor` is the *sum* over the ranks of their gradients by these rows. After
    data-parallel averaging a parameter then has the gradient of the mean of the ranks' losses.

    Collectives: one small one to agree on the numbers of rows (ranks may hold different numbers),
    one all-gather, and in the backward one all-reduce of the joined gradient, in float32 at least;
    all of them in `group`, from the thread that calls. Every rank must call this as often as the
    others, and run the backward if the others do.

    Args:
        tensor: ``[rows, ...]``, per rank; any floating dtype. All but the number of rows is the
            same on every rank. A rank may have no rows.
        group: The ranks; None is all of them.

    Returns:
        ``[rows of all ranks, ...]``, global, of the dtype of `tensor`; in a single process `tensor`
        itself.

    Raises:
        DataError: `tensor` is a scalar or not of a floating dtype.
        SyncError: The ranks' tensors differ in more than the number of rows, or this process is no
            member of `group`, or is a rank that has not joined the others.
        StaticGraphError: A Program is being built.

    Examples:
        >>> import paddle
        >>> vectors = paddle.ones([2, 3])
        >>> all_gather_with_grad(vectors).shape  # a single process
        [2, 3]
    """
    if tensor.ndim == 0 or not tensor.is_floating_point():
        raise DataError(
            f"received a tensor of shape {list(tensor.shape)} and {tensor.dtype}; allowed is "
            "[rows, ...] of a floating dtype"
        )
    if not has_other_ranks(group):
        return tensor
    if not _paddle.is_dygraph():
        raise StaticGraphError(
            "all_gather_with_grad works in dygraph only: Paddle has no gather with a gradient for "
            "Programs; ContrastiveLoss(negatives='global') works in them without one"
        )
    rows = agree_on_rows([tensor], group)
    return gather_rows([tensor], rows, group)[0]


@dataclass(frozen=True)
class RowsOfRanks:
    """Which rows of a joined tensor belong to which rank.

    Attributes:
        counts: Rows of each rank.
        rank: This one.
    """

    counts: tuple[int, ...]
    rank: int

    @property
    def total(self) -> int:
        """Rows of all ranks."""
        return sum(self.counts)

    @property
    def own(self) -> slice:
        """The rows of this rank."""
        first = sum(self.counts[: self.rank])
        return slice(first, first + self.counts[self.rank])

    def restore(self, padded: paddle.Tensor) -> paddle.Tensor:
        """Remove the padding that made the ranks' numbers of rows equal."""
        longest = max(self.counts)
        if min(self.counts) == longest:
            return padded
        firsts = (longest * rank for rank in range(len(self.counts)))
        return paddle.concat(
            [
                padded[first : first + count]
                for first, count in zip(firsts, self.counts, strict=True)
                if count
            ]
        )


def has_other_ranks(group: Group | None) -> bool:
    """Whether there are other ranks to gather from.

    Raises:
        SyncError: This process was launched as one of several ranks and has not joined them, or it
            is no member of `group`.
    """
    launched = int(os.environ.get("PADDLE_TRAINERS_NUM") or 1)
    joined = bool(dist.is_initialized())
    if not (is_distributed(group) if joined else launched > 1):
        return False
    if not joined:
        raise SyncError(
            f"this process is one of {launched} ranks (PADDLE_TRAINERS_NUM) and has not joined the "
            "others; call paddle.distributed.init_parallel_env() first"
        )
    if dist.get_rank(group) < 0:
        raise SyncError(f"rank {dist.get_rank()} is no member of the group {group}")
    return True


def agree_on_rows(tensors: Sequence[paddle.Tensor], group: Group | None) -> RowsOfRanks:
    """How many rows each rank has; the first axis of all `tensors` is that of the rows.

    Raises:
        SyncError: On every rank, if the ranks' tensors differ in anything else.
    """
    described = "; ".join(
        f"[rows{''.join(f', {size}' for size in tensor.shape[1:])}] {tensor.dtype}"
        # A rank that expects no gradient would stay away from the backward's all-reduce.
        f"{'' if tensor.stop_gradient or not paddle.is_grad_enabled() else ' with gradient'}"
        for tensor in tensors
    )
    mine = paddle.to_tensor([tensors[0].shape[0], zlib.crc32(described.encode())], dtype="int64")
    every = _all_gather(mine.unsqueeze(0), group).tolist()
    if len({checksum for _, checksum in every}) > 1:
        raise SyncError(
            f"the ranks cannot gather: rank {dist.get_rank(group)} has {described}, and another "
            "rank has something else; only the number of rows may differ"
        )
    return RowsOfRanks(tuple(int(count) for count, _ in every), int(dist.get_rank(group)))


def gather_rows(
    tensors: Sequence[paddle.Tensor], rows: RowsOfRanks, group: Group | None
) -> list[paddle.Tensor]:
    """Each of `tensors` with the rows of all ranks; those of a floating dtype with gradients.

    They are differentiated by one node, so that the ranks cannot meet in different collectives.
    """
    if rows.total == 0:
        return list(tensors)
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    results = _Gather.apply(rows, group, *floating) if floating else ()
    SingleBackwardGuard(
        SyncError,
        "the backward of gathered rows can run once only (received retain_graph=True or "
        "create_graph=True)",
    ).guard(*results)
    gathered = iter(results)
    return [
        next(gathered) if tensor.is_floating_point() else _joined(tensor, rows, group)
        for tensor in tensors
    ]


class _Gather(paddle.autograd.PyLayer):  # type: ignore[misc, unused-ignore]
    @staticmethod
    def forward(
        ctx: Any, rows: RowsOfRanks, group: Group | None, *tensors: paddle.Tensor
    ) -> tuple[paddle.Tensor, ...]:
        ctx.rows, ctx.group = rows, group
        ctx.needed = [not tensor.stop_gradient for tensor in tensors]
        return tuple(_joined(tensor, rows, group) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: paddle.Tensor) -> tuple[paddle.Tensor | None, ...]:
        return tuple(
            _summed(gradient, ctx.rows, ctx.group) if needed else None
            for gradient, needed in zip(gradients, ctx.needed, strict=True)
        )


def _joined(tensor: paddle.Tensor, rows: RowsOfRanks, group: Group | None) -> paddle.Tensor:
    missing = max(rows.counts) - tensor.shape[0]
    if missing:
        padding = paddle.zeros([missing, *tensor.shape[1:]], tensor.dtype)
        tensor = paddle.concat([tensor, padding])
    return rows.restore(_all_gather(tensor, group))


def _summed(gradient: paddle.Tensor, rows: RowsOfRanks, group: Group | None) -> paddle.Tensor:
    """This rank's rows of the sum over the ranks of `gradient`.

    A reduce-scatter would send half as much; gloo has none (2.6, 3.3), nor would it take different
    numbers of rows.
    """
    dtype = gradient.dtype
    half = dtype in (paddle.float16, paddle.bfloat16)  # gloo's sum of float16 is wrong
    # A copy in any case: the engine may have given the same tensor to another node.
    gradient = (gradient.astype("float32") if half else gradient.clone()).contiguous()
    what = "the sum of gradients of gathered rows"
    run_collective(lambda: dist.all_reduce(gradient, group=group), what, group)
    return gradient[rows.own].astype(dtype)


def _all_gather(tensor: paddle.Tensor, group: Group | None) -> paddle.Tensor:
    """Equal numbers of rows from each rank, joined."""
    num_ranks = dist.get_world_size(group)
    joined = paddle.empty([num_ranks * tensor.shape[0], *tensor.shape[1:]], tensor.dtype)
    own = tensor.contiguous()
    what = "the gather of rows"
    run_collective(lambda: dist.stream.all_gather(joined, own, group=group), what, group)
    return joined
